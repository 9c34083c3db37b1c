"""The TBQ4 codec, eagerly: see `flashq.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashq.tbq4 import CENTROIDS, EDGES, SIGN_IN, SIGN_OUT, SQUARES, SQUARES_SCALE, block_width


def _flip(x: Tensor, mask: int) -> Tensor:
    """Negate the elements of the last axis whose mask bit is set."""
    return x * x.new_tensor([-1.0 if mask >> i & 1 else 1.0 for i in range(x.shape[-1])])


def _hadamard(x: Tensor) -> Tensor:
    """Un-normalised Walsh-Hadamard transform of the last axis, natural order, stages h = 1, 2, 4, ..."""
    h = 1
    while h < x.shape[-1]:
        low, high = x.unflatten(-1, (x.shape[-1] // (2 * h), 2, h)).unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        h *= 2
    return x


def _blocks(x: Tensor, width: int) -> Tensor:
    """(..., D) -> (..., D / width, width)."""
    return x.unflatten(-1, (x.shape[-1] // width, width))


def _inverse_sqrt(width: int, like: Tensor) -> Tensor:
    return like.new_tensor(width**-0.5)


def _sqrt(x: Tensor) -> Tensor:
    """fp32, correctly rounded: torch's own fp32 square root may go through MKL, which is an ulp off at times."""
    return x.double().sqrt().float()


def tbq4_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> codes uint8 (..., D / 2), norms fp16 (..., D / block). Every operation rounds once, in fp32."""
    width = block_width(x.shape[-1])
    blocks = _blocks(x.float(), width)
    energy = blocks * blocks
    while energy.shape[-1] > 1:  # neighbours first, then neighbouring pairs: the pairs of the butterflies
        energy = energy[..., 0::2] + energy[..., 1::2]
    energy = energy[..., 0]
    length = _sqrt(energy)
    value = _flip(_hadamard(_flip(blocks, SIGN_IN)), SIGN_OUT)
    index = torch.zeros(blocks.shape, dtype=torch.int64, device=x.device)
    for edge in EDGES.to(x.device):
        index += value >= (edge * length)[..., None]  # a tie goes up
    zero, poison = length <= 1e-10, ~energy.isfinite()
    index[zero] = 8
    total = SQUARES.to(x.device)[index].sum(-1).float() * SQUARES_SCALE[width]
    norms = (length / _sqrt(total)).clamp_max(65504.0).half()
    norms = torch.where(zero, torch.zeros_like(norms), norms)
    index[poison] = 0
    bits = torch.where(poison, 0x7E00, norms.view(torch.int16))
    codes = (index[..., 0::2] | index[..., 1::2] << 4).to(torch.uint8)
    return codes.flatten(-2), bits.to(torch.int16).view(torch.float16)


def tbq4_dequantize(codes: Tensor, norms: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """codes (..., D / 2), norms (..., D / block) -> (..., D) in ``dtype`` (None: float32), rounded from fp32 once."""
    width = block_width(2 * codes.shape[-1])
    index = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    value = _hadamard(_flip(CENTROIDS[width].to(codes.device)[_blocks(index, width).long()], SIGN_OUT))
    value = value * _inverse_sqrt(width, value) * norms.float()[..., None]
    return _flip(value, SIGN_IN).flatten(-2).to(dtype or torch.float32)


def tbq4_rotate(x: Tensor, *, inverse: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """The block rotation of queries, x (..., D); ``inverse`` undoes it (attention outputs)."""
    first, last = (SIGN_OUT, SIGN_IN) if inverse else (SIGN_IN, SIGN_OUT)
    blocks = _blocks(x.to(dtype), block_width(x.shape[-1]))
    return _flip(_hadamard(_flip(blocks, first)) * _inverse_sqrt(blocks.shape[-1], blocks), last).flatten(-2)
