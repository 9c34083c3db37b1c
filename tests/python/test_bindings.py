"""flashq._C: what it says about the build, the CPU, the GPUs and the plan of work."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import flashq
from flashq import tbq4

_C = pytest.importorskip("flashq._C", reason="flashq._C was built for another Python", exc_type=ImportError)


@pytest.fixture
def level() -> Iterator[None]:
    """Put the ISA level back after a test that changes it."""
    before = _C.cpu_isa()
    yield
    _C.set_cpu_isa(before)


def test_build_info() -> None:
    info = _C.build_info()
    assert set(info) == {"version", "compiler", "torch", "cuda_archs"}
    assert info["version"] == flashq.__version__


def test_every_level_of_this_cpu_can_be_chosen(level: None) -> None:
    levels = _C.cpu_isa_levels().split(", ")
    assert levels[0] == "portable"
    for name in levels:
        _C.set_cpu_isa(name)
        assert _C.cpu_isa() == name


def test_another_level_is_refused(level: None) -> None:
    before = _C.cpu_isa()
    with pytest.raises(ValueError, match=r"flashq::set_cpu_isa: name: expected one of portable.*, got sse9"):
        _C.set_cpu_isa("sse9")
    assert _C.cpu_isa() == before


def test_levels_follow_from_the_features() -> None:
    features = _C.cpu_features()
    levels = _C.cpu_isa_levels().split(", ")
    avx2 = ("avx2", "fma", "f16c", "bmi2")
    avx512 = tuple(f"avx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16"))
    assert ("avx2" in levels) == all(features.get(name, False) for name in avx2)
    assert ("avx512" in levels) == all(features.get(name, False) for name in avx2 + avx512)


@pytest.mark.parametrize("name", ["portable", "sse9"])
def test_the_environment_chooses_the_level(name: str) -> None:
    env = {**os.environ, "FLASHQ_CPU_ISA": name}
    code = "import flashq._C; print(flashq._C.cpu_isa())"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ("portable" if name == "portable" else "")


def test_gpus_are_those_of_torch() -> None:
    expected = []
    if torch.cuda.is_available() and flashq.libraries.cuda_problem is None:
        for index in range(torch.cuda.device_count()):
            expected.append((index, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)))
    assert [(gpu["index"], gpu["name"], gpu["capability"]) for gpu in _C.gpus()] == expected
    for gpu in _C.gpus():
        assert gpu["shared_bytes"] >= 99 << 10
        major, minor = gpu["capability"]
        overridden = any(os.environ.get(name) for name in ("FLASHQ_CUDA_ARCH", "FLASHQ_CUDA_SMEM"))
        assert overridden or (gpu["kernel_arch"], gpu["kernel_shared_bytes"]) == (
            10 * major + minor,
            gpu["shared_bytes"],
        )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_codebook(head_dim: int) -> None:
    levels = _C.tbq4_codebook(head_dim)
    assert len(levels) == 16
    assert levels == sorted(levels)
    assert torch.equal(torch.tensor(levels), tbq4.CENTROIDS[tbq4.block_width(head_dim)])


def test_codebook_of_another_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim: expected 64, 128 or 256, got 96"):
        _C.tbq4_codebook(96)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 257, 5000])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (0, 4096), (700, 5000), (0, 300_000), (131_000, 131_072)])
@pytest.mark.parametrize("kv_chunk", [0, 256, 1024])
def test_splits_cover_the_visible_keys(begin: int, end: int, rows: int, kv_chunk: int) -> None:
    keys, first, count = _C.work_plan(begin, end, rows, kv_chunk)
    assert keys % 64 == 0
    assert keys == kv_chunk or not kv_chunk
    assert count >= 1
    if end > begin:
        assert first * keys <= begin < (first + 1) * keys
        assert count == math.ceil(end / keys) - first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 5, 1), "begin: expected at least 0, got -1"),
        ((0, 2**63 - 1, 1), "end: expected at most 2\\^62, got 9223372036854775807"),
        ((0, 5, 0), "rows: expected at least 1, got 0"),
        ((0, 5, 1, 100), "kv_chunk: expected 0 or a multiple of 64 from 256 on, got 100"),
        ((0, 5, 1, -64), "kv_chunk: expected 0 or a multiple of 64 from 256 on, got -64"),
    ],
)
def test_a_bad_plan_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"flashq::work_plan: {message}"):
        _C.work_plan(*arguments)
