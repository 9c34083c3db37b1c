"""The ceilings of this machine's CPU, measured by probes.cpp; and how probes are compiled."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from flashq.cli.machine import cpu_model

SOURCE = Path(__file__).with_name("probes.cpp")
FLAGS = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]


def cache_folder() -> Path:
    """Where the compiled probes stay."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashq"


def compile_library(source: Path, compiler: str, flags: list[str], salt: str = "") -> ctypes.CDLL:
    """Compile `source`, once a content, compiler, flags and `salt`, and load it.

    Raises:
        RuntimeError: the compiler fails.
    """
    key = hashlib.sha256("\0".join([source.read_text(), *flags, compiler, salt]).encode()).hexdigest()[:16]
    path = cache_folder() / f"{source.stem}-{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder, path.name)
            command = [compiler, *flags, str(source), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"benchmarks: compiling the probes failed: {done.stderr.strip()[:500]}")
            fresh.replace(path)
    return ctypes.CDLL(str(path))


def find_compiler() -> str:
    """The C++ compiler of CXX or PATH.

    Raises:
        RuntimeError: there is none.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("benchmarks: the ceilings need a C++ compiler: expected c++ on PATH or CXX, found none")
    return compiler


@functools.cache
def library() -> ctypes.CDLL:
    """The probes for this CPU.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    loaded = compile_library(SOURCE, find_compiler(), FLAGS, cpu_model())
    for function in (loaded.probe_fma, loaded.probe_bf16, loaded.probe_read):
        function.restype = ctypes.c_double
    loaded.probe_fma.argtypes = loaded.probe_bf16.argtypes = [ctypes.c_int, ctypes.c_int64]
    loaded.probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    return loaded


def fma_rate(steps: int = 1 << 20) -> float:
    """fp32 FLOP/s of all torch threads."""
    return library().probe_fma(torch.get_num_threads(), steps)


def bf16_rate(steps: int = 1 << 20) -> float:
    """bf16 dot-product FLOP/s of all torch threads; 0 where the CPU has no such instruction."""
    return library().probe_bf16(torch.get_num_threads(), steps)


def read_rate(tensors: list[Tensor], least_bytes: float = 1e9) -> float:
    """Bytes/s of reading the tensors' memory with all torch threads, over and over up to `least_bytes`.

    The best of several access patterns, because a ceiling that a kernel beats is none: 1 stream a thread reaches 16.7
    GB/s on two Zen 3 cores, 8 streams 19.3. Tensors too small for every thread to get a stream do not count.
    """
    return max(_read_rate(tensors, least_bytes, streams) for streams in (1, 4, 8))


def _read_rate(tensors: list[Tensor], least_bytes: float, streams: int) -> float:
    total, seconds = 0.0, 0.0
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        passes = max(1, round(least_bytes / len(tensors) / size))
        rate = library().probe_read(tensor.data_ptr(), size, torch.get_num_threads(), passes, streams)
        if rate > 0:
            total, seconds = total + size * passes, seconds + size * passes / rate
    return total / seconds if seconds else 0.0
