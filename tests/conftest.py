"""Fixtures and markers: devices, CPU instruction sets, the lines of the contract."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import flashq
from flashq.cli.machine import cpu_level, cpu_levels

REQUIRE_CUDA = os.environ.get("FLASHQ_REQUIRE_CUDA") == "1"


def cuda_problem() -> str | None:
    """Why tests marked cuda cannot run here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return flashq.libraries.cuda_problem


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract(line, ...): tests these numbered lines of docs/contract.md")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and (problem := cuda_problem()):
        if REQUIRE_CUDA:
            pytest.fail(f"FLASHQ_REQUIRE_CUDA=1, but {problem}")
        pytest.skip(problem)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """For tests of ops that CUDA has too."""
    return torch.device(request.param)


@pytest.fixture
def set_isa() -> Iterator[Callable[[str], None]]:
    """Chooses the instruction set of the CPU kernels, for one test."""
    with ExitStack() as levels:
        yield lambda name: levels.enter_context(cpu_level(name))


@pytest.fixture(params=cpu_levels().available)
def isa(request: pytest.FixtureRequest, set_isa: Callable[[str], None]) -> str:
    """Runs the test once for every instruction set that this machine has a kernel for."""
    set_isa(request.param)
    return request.param


@pytest.fixture
def enter_backend(set_isa: Callable[[str], None]) -> Callable[[str], torch.device]:
    """Chooses a level of the CPU, or CUDA ("cuda"), for one test; returns the device."""

    def enter(name: str) -> torch.device:
        if name != "cuda":
            set_isa(name)
        return torch.device("cuda" if name == "cuda" else "cpu")

    return enter


@pytest.fixture(params=[*cpu_levels().available, pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest, enter_backend: Callable[[str], torch.device]) -> torch.device:
    """`isa` and `device` in one: the test runs at every level of the CPU, and on CUDA."""
    return enter_backend(request.param)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread unless a test says otherwise (`accuracy.using_threads`): the tensors here are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
