"""The queries, keys and values of real models that come with the package (data/README.md says from where)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CAPTURES = {
    "qwen_layer0": "Qwen2.5-Coder-1.5B layer 0",
    "smollm2_layer5": "SmolLM2-135M layer 5",
}
PATH = Path(__file__).parent.parent / "data" / "real_qkv.npz"


class Capture(NamedTuple):
    """One attention layer's inputs on 352 tokens of English, fp16, after RoPE."""

    name: str
    title: str
    q: Tensor
    """(32, Hq, D): the queries of the last 32 tokens."""
    k: Tensor
    """(352, Hkv, D)."""
    v: Tensor
    """(352, Hkv, D)."""


def load_capture(name: str) -> Capture:
    """The capture of that name, one of `CAPTURES`, on the CPU."""
    with np.load(PATH) as arrays:
        q, k, v = (torch.from_numpy(arrays[f"{name}.{part}"]) for part in "qkv")
    return Capture(name, CAPTURES[name], q, k, v)
