"""What writes into caches, eagerly: see `flashq.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashq.reference.tbq4 import tbq4_dequantize, tbq4_quantize
from flashq.tbq4 import OFFSET_WINDOW


def kv_append_(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v (T, Hkv, D) into slots (T) of caches (P, N, Hkv, D): slot s is page s // N, row s % N; negative: skipped."""
    kept = slots >= 0
    page, row = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[page.long(), row.long()] = k[kept]
    v_cache[page.long(), row.long()] = v[kept]


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


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (T, H, D) with the angles of its tokens, (T, rotary_dim / 2): in fp32, rounded once to x's dtype."""
    count = cos.shape[1]
    y, cos, sin = x.float(), cos.float()[:, None], sin.float()[:, None]
    if interleaved:
        a, b = y[..., 0 : 2 * count : 2], y[..., 1 : 2 * count : 2]
    else:
        a, b = y[..., :count], y[..., count : 2 * count]
    turned = [a * cos - b * sin, b * cos + a * sin]
    head = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([head, y[..., 2 * count :]], dim=-1).to(x.dtype)


def tbq4_rope_append_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_codes: Tensor,
    k_norms: Tensor,
    v_codes: Tensor,
    v_norms: Tensor,
    slots: Tensor,
    k_offsets: Tensor | None = None,
    exact_k: Tensor | None = None,
    exact_v: Tensor | None = None,
    exact_slots: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """q (T, Hq, D), k, v (T, Hkv, D), cos, sin (max_position, rotary_dim / 2), positions (T) -> q, turned; k, turned,
    and v go into slots (T) of planes (P, Hkv, N, ...) and exact_slots (T) of an exact pool (Pe, Ne, Hkv, D)."""
    angles = cos[positions.long()], sin[positions.long()]
    k = _turn(k, *angles, interleaved)
    tbq4_append_(k, v, k_codes, k_norms, v_codes, v_norms, slots, k_offsets)
    if exact_slots is not None:
        kv_append_(k, v, exact_k, exact_v, exact_slots)
    return _turn(q, *angles, interleaved)


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
