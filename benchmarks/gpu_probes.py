"""The kernels of gpu_probes.cu, for the current GPU and stream."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.probes import compile_library

SOURCE = Path(__file__).with_name("gpu_probes.cu")
FLAGS = ["-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC"]


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
