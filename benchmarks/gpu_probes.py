"""The ceilings of the current GPU: reads and copies by gpu_probes.cu, bf16 products by torch.matmul."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.probes import compile_library

SOURCE = Path(__file__).with_name("gpu_probes.cu")
FLAGS = ["-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC"]
MATMUL_SIZE = 8192
STREAM_BYTES = 1 << 30

T = TypeVar("T")


def find_nvcc() -> str:
    """The nvcc of CUDA_HOME, PATH or /usr/local/cuda.

    Raises:
        RuntimeError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin"] if home else []
    for place in (*places, None, "/usr/local/cuda/bin"):
        if found := shutil.which("nvcc", path=place):
            return found
    raise RuntimeError("benchmarks: the ceilings need nvcc: expected it in CUDA_HOME or on PATH, found none")


@functools.cache
def library() -> ctypes.CDLL:
    """The probes for the current GPU.

    Raises:
        RuntimeError: there is no nvcc, or it fails.
    """
    major, minor = torch.cuda.get_device_capability()
    loaded = compile_library(SOURCE, find_nvcc(), [*FLAGS, f"-arch=sm_{major}{minor}"])
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.probe_empty.argtypes = [pointer]
    loaded.probe_spin.argtypes = [count, pointer]
    loaded.probe_read.argtypes = loaded.probe_copy.argtypes = [pointer, pointer, count, number, number, pointer]
    return loaded


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"benchmarks: a probe failed with CUDA error {error}")


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def launch_empty() -> None:
    """A kernel that does nothing."""
    _check(library().probe_empty(_stream()))


def spin(seconds: float) -> None:
    """Keep the stream busy for so long."""
    _check(library().probe_spin(int(seconds * 1e9), _stream()))


def read(data: Tensor, sink: Tensor, blocks_per_sm: int = 8, unroll: int = 4) -> None:
    """Read the tensor's bytes (a multiple of 16) once."""
    _check(library().probe_read(data.data_ptr(), sink.data_ptr(), data.nbytes, blocks_per_sm, unroll, _stream()))


def copy(source: Tensor, target: Tensor, blocks_per_sm: int, unroll: int) -> None:
    """Copy the tensor's bytes (a multiple of 16)."""
    number = source.nbytes
    _check(library().probe_copy(source.data_ptr(), target.data_ptr(), number, blocks_per_sm, unroll, _stream()))


def _seconds(call: Callable[[], object], rounds: int = 7) -> float:
    """The best of a few calls: what the GPU can do."""
    call()
    pairs = []
    spin(1e-4)
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return min(start.elapsed_time(stop) for start, stop in pairs) * 1e-3


@dataclass
class Ceiling:
    """A call that does as much `work` (bytes, floating-point operations) a second as the GPU can."""

    call: Callable[[], object]
    work: float

    def rate(self) -> float:
        """Work a second, the best of a few calls."""
        return self.work / _seconds(self.call)


class Ceilings:
    """The ceilings of one run, over random data; each is set up when it is first asked for.

    Of several access patterns the fastest is taken, because a ceiling that a kernel beats is none.
    """

    def __init__(self, stream_bytes: int = STREAM_BYTES, matmul_size: int = MATMUL_SIZE) -> None:
        self._bytes = stream_bytes
        self._matmul_size = matmul_size

    @functools.cached_property
    def _data(self) -> Tensor:
        return torch.randn(self._bytes // 2, device="cuda", dtype=torch.bfloat16)

    @functools.cached_property
    def read(self) -> Ceiling:
        sink = torch.empty(16, device="cuda", dtype=torch.uint8)
        patterns = [
            functools.partial(read, self._data, sink, blocks, unroll) for blocks in (2, 4, 8, 32) for unroll in (4, 8)
        ]
        return Ceiling(min(patterns, key=_seconds), self._data.nbytes)

    @functools.cached_property
    def copy(self) -> Ceiling:
        target = torch.empty_like(self._data)
        patterns: list[Callable[[], object]] = [
            functools.partial(copy, self._data, target, blocks, unroll) for blocks in (2, 4, 8, 32) for unroll in (4, 8)
        ]
        patterns.append(lambda: target.copy_(self._data))
        return Ceiling(min(patterns, key=_seconds), 2.0 * self._data.nbytes)

    @functools.cached_property
    def matmul(self) -> Ceiling:
        size = self._matmul_size
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return Ceiling(lambda: torch.mm(a, b, out=out), 2.0 * size**3)

    def rates(self) -> dict[str, float]:
        """Each ceiling's work a second, for the header."""
        return {f"{name}_rate": getattr(self, name).rate() for name in ("read", "copy", "matmul")}


def under_load(ceilings: Ceilings, look: Callable[[], T], seconds: float = 1.0) -> T:
    """Call `look` while the GPU multiplies matrices for about `seconds`."""
    for _ in range(math.ceil(seconds * ceilings.matmul.rate() / ceilings.matmul.work)):
        ceilings.matmul.call()
    found = look()
    torch.cuda.synchronize()
    return found
