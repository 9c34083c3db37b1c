"""The TBQ4 codec and the appends to its planes, eagerly: see `flashq.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashq.tbq4 import CENTROIDS, EDGES, OFFSET_WINDOW, SIGN_IN, SIGN_OUT, SQUARES, SQUARES_SCALE, block_width


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


def tbq4_append_(
    k: Tensor,
    v: Tensor,
    k_codes: Tensor,
    k_norms: Tensor,
    v_codes: Tensor,
    v_norms: Tensor,
    slots: Tensor,
    k_offsets: Tensor | None = None,
) -> None:
    """k, v (T, Hkv, D), encoded into slots (T) of planes (P, Hkv, N, ...); k less its page's offset (P, Hkv, D)."""
    kept = slots >= 0
    page, row = (slots[kept] // k_codes.shape[2]).long(), (slots[kept] % k_codes.shape[2]).long()
    keys = k[kept].float()
    if k_offsets is not None:
        keys = keys - k_offsets[page].float()
    for rows, codes, norms in ((keys, k_codes, k_norms), (v[kept], v_codes, v_norms)):
        codes[page, :, row], norms[page, :, row] = tbq4_quantize(rows)


def _finite_mean(keys: list[Tensor]) -> Tensor:
    """Mean of keys (Hkv, D), fp16: fp32 sums in their order, over what is finite; clamped, 0 of nothing."""
    total, count = torch.zeros_like(keys[0]), torch.zeros_like(keys[0])
    for key in keys:
        total = total + torch.where(key.isfinite(), key, 0)
        count = count + key.isfinite()
    limit = torch.finfo(torch.float16).max
    return torch.where(count > 0, total / count.clamp_min(1), 0).clamp(-limit, limit).half()


def tbq4_page_offsets_(
    k: Tensor,
    k_codes: Tensor,
    k_norms: Tensor,
    k_offsets: Tensor,
    seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    kv_start: Tensor | None = None,
    exact_k: Tensor | None = None,
    exact_block_table: Tensor | None = None,
) -> None:
    """k (T, Hkv, D), cut by cu_seqlens (B + 1) -> k_offsets (P, Hkv, D) of the pages that the append opens."""
    page_size = k_codes.shape[2]

    def earlier_key(b: int, token: int) -> Tensor | None:
        if exact_k is not None and token // exact_k.shape[1] < exact_block_table.shape[1]:
            page = int(exact_block_table[b, token // exact_k.shape[1]])
            if 0 <= page < exact_k.shape[0]:
                return exact_k[page, token % exact_k.shape[1]].float()
        page, slot = int(block_table[b, token // page_size]), token % page_size
        if not 0 <= page < k_codes.shape[0]:
            return None
        return tbq4_dequantize(k_codes[page, :, slot], k_norms[page, :, slot]) + k_offsets[page].float()

    ends = cu_seqlens.tolist()
    for b, length in enumerate(seqlens.tolist()):
        added = k[ends[b] : ends[b + 1]].float()
        start, first = length - len(added), 0 if kv_start is None else int(kv_start[b])
        for index in range(-(-length // page_size)):
            opening, end = max(index * page_size, first), (index + 1) * page_size
            if not start <= opening < min(end, length):
                continue
            before = range(max(first, opening - OFFSET_WINDOW), opening)
            keys = [added[token - start] if token >= start else earlier_key(b, token) for token in before]
            keys = [key for key in keys if key is not None]
            if length >= end or not keys:
                keys = list(added[opening - start : end - start])
            k_offsets[int(block_table[b, index])] = _finite_mean(keys)
