"""Facts about this machine and this build, for info, selftest and benchmarks."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import flashq
from flashq import _load


class CpuLevels(NamedTuple):
    """ISA levels of the CPU kernels."""

    available: list[str]
    """Those that are built and that this CPU can run, lowest first."""
    selected: str | None
    """The one that the ops use: the highest, or FLASHQ_CPU_ISA. None: that names none that this CPU has."""


class Gpu(NamedTuple):
    """The current CUDA device, and why flashq cannot use it (None: it can)."""

    name: str
    capability: tuple[int, int]
    problem: str | None


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(flashq.libraries.folder / "libflashq.so"))
    for function in (library.flashq_compiler, library.flashq_cpu_isa, library.flashq_cpu_isa_levels):
        function.restype = ctypes.c_char_p
    library.flashq_set_cpu_isa.argtypes = [ctypes.c_char_p]
    return library


def compiler() -> str:
    """The compiler that built libflashq.so."""
    return _library().flashq_compiler().decode()


def cpu_levels() -> CpuLevels:
    """The ISA levels that this CPU has, and which one is in use."""
    library = _library()
    selected = library.flashq_cpu_isa()
    return CpuLevels(library.flashq_cpu_isa_levels().decode().split(", "), selected and selected.decode())


@contextmanager
def cpu_level(name: str) -> Iterator[None]:
    """Run the CPU ops of the block at another ISA level. Process-wide: no other thread may be in an op.

    Raises:
        ValueError: this CPU, or the build, does not have the level.
    """
    library = _library()
    before = library.flashq_cpu_isa()
    if library.flashq_set_cpu_isa(name.encode()) != 0:
        raise ValueError(f"CPU level: expected one of {', '.join(cpu_levels().available)}, got {name!r}")
    try:
        yield
    finally:
        if before is not None:
            library.flashq_set_cpu_isa(before)


def cuda_overrides() -> tuple[str, str | None]:
    """FLASHQ_CUDA_ARCH and FLASHQ_CUDA_SMEM where they are set, as "NAME=value, NAME=value"; and what is wrong with
    them, or None."""
    names = ("FLASHQ_CUDA_ARCH", "FLASHQ_CUDA_SMEM")
    text = ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
    if not text or flashq.libraries.cuda_problem is not None:
        return text, None
    library = ctypes.CDLL(str(flashq.libraries.folder / "libflashq_cuda.so"))
    problem = ctypes.create_string_buffer(480)
    values = (os.environ.get(name, "").encode() for name in names)
    library.flashq_cuda_check_overrides(*values, problem, len(problem))
    return text, f"{problem.value.decode()}." if problem.value else None


def find_gpu() -> Gpu | None:
    """The current GPU, or None where torch finds none."""
    if not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    problem = flashq.libraries.cuda_problem
    if problem is None and not _load.gpu_is_covered(capability, flashq.libraries.cuda_archs):
        problem = _load.unsupported_gpu_message(name, capability, flashq.libraries.cuda_archs)
    return Gpu(name, capability, problem)


def describe_gpu(gpu: Gpu | None) -> str:
    """One line about the GPU and whether it was usable."""
    if gpu is None:
        return "torch finds no GPU here, so CUDA was not tested"
    return f"{gpu.name}: {gpu.problem or 'supported'}"


def cpu_model() -> str:
    """The CPU's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
