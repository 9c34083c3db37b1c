"""The empty op of empty_op.cpp, beside which the host's time of flashq's is measured."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import flashq  # noqa: F401  (its schemas)
from benchmarks.probes import compile_library, find_compiler

SOURCE = Path(__file__).with_name("empty_op.cpp")
NAME = "an empty op"


@functools.cache
def decode() -> Any:
    """An op with the schema of `torch.ops.flashq.decode` that returns q twice.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    schema = str(torch.ops.flashq.decode.default._schema).removeprefix("flashq::")
    home = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O3",
        "-shared",
        "-fPIC",
        f"-isystem{home}/include",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    flags += [f'-DEMPTY_OP_SCHEMA="{schema}"', f"-L{home}/lib", "-Wl,--no-as-needed", "-ltorch_cpu"]
    compile_library(SOURCE, find_compiler(), flags, torch.__version__)
    return torch.ops.flashq_empty.decode
