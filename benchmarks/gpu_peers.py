"""Other libraries' attention, as contenders on a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashq.cli.timing import Call

FA3 = "FlashAttention-3"
FA3_PACKAGE = "fa3-fwd"
SDPA = {"torch flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def versions() -> str:
    """What is installed, for the header."""
    try:
        fa3 = importlib.metadata.version(FA3_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        fa3 = "none"
    return f"cuDNN {torch.backends.cudnn.version()}, {FA3_PACKAGE} {fa3}"


def fa3() -> Any | None:
    """The module of FlashAttention-3 (PyPI `fa3-fwd` and `einops`), None where it is not installed."""
    try:
        return importlib.import_module("fa3_fwd_interface")
    except ModuleNotFoundError:
        return None


def fa3_calls(inputs: Sequence[Tensor], run: Callable[..., Any], name: str = FA3) -> dict[str, Call]:
    """run(module, *inputs) as a contender, none where FlashAttention-3 is not installed.

    Its wheel computes in bf16 alone: other inputs are cast, and the contender's name says so.
    """
    module = fa3()
    if module is None:
        return {}
    if inputs[0].dtype != torch.bfloat16:
        name, inputs = f"{name} in bf16", [x.bfloat16() for x in inputs]
    return {name: lambda: run(module, *inputs)}


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """torch's SDPA by each of its fast backends; q (B, S, Hq, D), k and v (B, S, Hkv, D) are laid out as it likes."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return {name: lambda backend=backend: call(backend) for name, backend in SDPA.items()}
