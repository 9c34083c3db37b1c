"""Reads tests/data/tbq4_golden.npz: the published vectors of the TBQ4 codec and of attention over it.

Codec groups hold x, names, codes, norms, blocks and decoded; names say what a row is for (trap_*: one wrong way of
computing changes its bytes). Attention groups hold q, poisoned planes, a table, and out and lse in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_ARRAYS = np.load(Path(__file__).parent / "data" / "tbq4_golden.npz")
CODEC_GROUPS = tuple(sorted({name.split(".")[0] for name in _ARRAYS.files if not name.startswith("attn_")}))
ATTENTION_GROUPS = tuple(sorted({name.split(".")[0] for name in _ARRAYS.files if name.startswith("attn_")}))


def load(group: str) -> dict[str, Tensor]:
    """The arrays of a group as tensors; norms as fp16, x in the dtype that the group's name says."""
    tensors = {}
    for name in _ARRAYS.files:
        if name.split(".")[0] != group or name.endswith(".names"):
            continue
        array = _ARRAYS[name]
        if array.dtype == np.uint16:  # bits: of fp16 in norms, of bf16 in x
            bits = torch.from_numpy(array.view(np.int16).copy())
            tensors[name.split(".")[1]] = bits.view(torch.bfloat16 if name.endswith(".x") else torch.float16)
        else:
            tensors[name.split(".")[1]] = torch.from_numpy(array.copy())
    return tensors


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; of floats, any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())).all())
