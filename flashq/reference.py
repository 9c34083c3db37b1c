"""Plain eager versions of every flashq op: the definition of what the ops compute, and their oracle in the tests.

Each function takes the arguments of the op of its name, and ``dtype``: everything is computed in that precision
(float32, float64, or a 16-bit dtype to see what eager attention loses there) and ``out`` and ``lse`` are returned in
it, not rounded to the inputs' dtype unless ``out_dtype`` asks for that. Hints (``max_seqlen_*``, ``kv_chunk``) are
accepted and do nothing. Nothing here is fast, and nothing here calls a flashq kernel.

``stats``, when given a dict, receives the largest score in absolute value over all visible pairs: ``max_score``, and
``max_score_no_offset`` without the term of the key offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashq.tbq4 import CENTROIDS, EDGES, OFFSET_WINDOW, SIGN_IN, SIGN_OUT, SQUARES, SQUARES_SCALE, block_width

__all__ = [
    "decode",
    "kv_append_",
    "merge_states",
    "prefill",
    "prefill_varlen",
    "tbq4_append_",
    "tbq4_attention",
    "tbq4_dequantize",
    "tbq4_page_offsets_",
    "tbq4_quantize",
    "tbq4_rotate",
]

Stats = dict[str, float]


# --- which keys a query sees, and softmax over them -------------------------------------------------------------------


def visible_keys(
    q_len: int, kv_len: int, *, kv_start: int = 0, causal: bool = False, window_left: int = -1, window_right: int = -1
) -> Tensor:
    """Bool (q_len, kv_len). Bottom-right: the last query stands at the last key, query i at i + kv_len - q_len."""
    position = torch.arange(q_len)[:, None] + (kv_len - q_len)
    key = torch.arange(kv_len)[None, :]
    visible = (key >= kv_start).expand(q_len, kv_len).clone()
    if causal:
        visible &= key <= position
    if window_left != -1:
        visible &= key >= position - window_left
    if window_right != -1:
        visible &= key <= position + window_right
    return visible


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q (Sq, Hq, D), k (Sk, Hkv, D) -> q.k (Hq, Sq, Sk); query head h reads KV head h // (Hq / Hkv)."""
    group = q.shape[1] // k.shape[1]
    return q.transpose(0, 1) @ k.repeat_interleave(group, dim=1).permute(1, 2, 0)


def _weigh(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights (Hq, Sq, Sk), v (Sk, Hkv, D) -> (Sq, Hq, D). A key that a row does not see cannot touch the row."""
    v = v.repeat_interleave(weights.shape[0] // v.shape[1], dim=1).transpose(0, 1)  # (Hq, Sk, D)
    odd = ~v.isfinite().all(-1).all(0)  # (Sk): NaN and Inf would reach rows that do not see them as 0 * NaN
    out = weights @ torch.where(odd[:, None], 0, v)
    for j in odd.nonzero()[:, 0].tolist():
        out += torch.where(visible[:, j, None], weights[:, :, j, None] * v[:, None, j], 0)
    return out.transpose(0, 1)


def _attend(
    q: Tensor,
    scores: Tensor,
    visible: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    stats: Stats | None,
    offset_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Raw scores (Hq, Sq, Sk) -> weights (Hq, Sq, Sk), lse (Hq, Sq)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    parts = {"max_score_no_offset": scores}
    if offset_scores is not None:
        scores = scores + offset_scores
    parts["max_score"] = scores
    if stats is not None:
        for name, part in parts.items():
            seen = (part * scale)[visible.expand_as(part)].abs()
            seen = seen[seen.isfinite()]
            stats[name] = max(stats.get(name, 0.0), seen.max().item() if seen.numel() else 0.0)
    scores = scores * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    logits = torch.where(visible, scores, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[-1]]
    weights = torch.where(visible.any(-1)[:, None], weights, 0)  # rows without a key: 0, not the NaN of 0 / 0
    lse = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:2], float("-inf"))
    return weights, lse


def _attend_dense(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, scale: float | None, softcap: float,
    dtype: torch.dtype, stats: Stats | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: q (Sq, Hq, D), k and v (Sk, Hkv, D) -> out (Sq, Hq, D), lse (Hq, Sq)."""
    visible = visible.to(q.device)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    weights, lse = _attend(q, _scores(q, k), visible, sinks, scale, softcap, stats)
    return _weigh(weights, v, visible), lse


def _empty_state(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(0, -inf) for q (..., S, Hq, D): out (..., S, Hq, D), lse (..., Hq, S)."""
    out = q.new_zeros(q.shape, dtype=dtype)
    return out, q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("-inf"), dtype=dtype)


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    stats: Stats | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D) -> out (B, Sq, Hq, D), lse (B, Hq, Sq)."""
    out, lse = _empty_state(q, dtype)
    visible = visible_keys(q.shape[1], k.shape[1], causal=causal, window_left=window_left, window_right=window_right)
    for b in range(q.shape[0]):
        out[b], lse[b] = _attend_dense(q[b], k[b], v[b], visible, sinks, scale, softcap, dtype, stats)
    return out, lse


def prefill_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    stats: Stats | None = None,
) -> tuple[Tensor, Tensor]:
    """q (Tq, Hq, D), k and v (Tk, Hkv, D), cu_seqlens (B + 1) -> out (Tq, Hq, D), lse (Hq, Tq)."""
    out, lse = _empty_state(q, dtype)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        visible = visible_keys(
            rows.stop - rows.start, keys.stop - keys.start,
            causal=causal, window_left=window_left, window_right=window_right,
        )  # fmt: skip
        out[rows], lse[:, rows] = _attend_dense(q[rows], k[keys], v[keys], visible, sinks, scale, softcap, dtype, stats)
    return out, lse


# --- caches -----------------------------------------------------------------------------------------------------------


def _locate(
    tokens: Tensor, page_size: int, num_pages: int, table: Tensor | None, sequence: int
) -> tuple[Tensor, Tensor]:
    """Pages and slots of tokens of one sequence; a page outside the cache is an error."""
    slots = tokens % page_size
    if table is None:
        return torch.full_like(tokens, sequence), slots
    pages = table[sequence].to(torch.int64)[tokens // page_size]
    if ((pages < 0) | (pages >= num_pages)).any():
        raise ValueError(f"block_table: expected pages in [0, {num_pages}), got {pages.tolist()}")
    return pages, slots


def _queries(q: Tensor, cu_seqlens_q: Tensor | None, batch: int) -> list[tuple[int | slice, ...]]:
    """The index of every sequence's queries in q."""
    if cu_seqlens_q is None:
        return [(b,) for b in range(batch)]
    ends = cu_seqlens_q.tolist()
    return [(slice(ends[b], ends[b + 1]),) for b in range(batch)]


def _store_lse(lse: Tensor, index: tuple[int | slice, ...], value: Tensor) -> None:
    lse[(slice(None), *index) if isinstance(index[0], slice) else index] = value


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_start: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    max_seqlen_q: int = 0,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    kv_chunk: int = 0,
    out_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    stats: Stats | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q (B + 1); caches (P, N, Hkv, D) -> out as q, lse (B, Hq, Sq)
    or (Hq, Tq). Only keys that some query sees are read, and only their entries of the table."""
    out, lse = _empty_state(q, dtype)
    for b, index in enumerate(_queries(q, cu_seqlens_q, seqlens.shape[0])):
        start = 0 if kv_start is None else int(kv_start[b])
        visible = visible_keys(len(q[index]), int(seqlens[b]), kv_start=start, causal=causal, window_left=window_left)
        tokens = visible.any(0).nonzero()[:, 0].to(q.device)
        pages, slots = _locate(tokens, k_cache.shape[1], k_cache.shape[0], block_table, b)
        out[index], part = _attend_dense(
            q[index], k_cache[pages, slots], v_cache[pages, slots], visible[:, tokens.cpu()],
            sinks, scale, softcap, dtype, stats,
        )  # fmt: skip
        _store_lse(lse, index, part)
    return out if out_dtype is None else out.to(out_dtype), lse


def kv_append_(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v (T, Hkv, D) into slots (T) of caches (P, N, Hkv, D): slot s is page s // N, row s % N; negative: skipped."""
    kept = slots >= 0
    page, row = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[page.long(), row.long()] = k[kept]
    v_cache[page.long(), row.long()] = v[kept]


# --- TBQ4 -------------------------------------------------------------------------------------------------------------


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


def tbq4_attention(
    q: Tensor,
    k_codes: Tensor,
    k_norms: Tensor,
    v_codes: Tensor,
    v_norms: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_start: Tensor | None = None,
    sinks: Tensor | None = None,
    k_offsets: Tensor | None = None,
    exact_k: Tensor | None = None,
    exact_v: Tensor | None = None,
    exact_block_table: Tensor | None = None,
    *,
    exact_first: int = 0,
    exact_last: int = 0,
    max_seqlen_q: int = 0,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    kv_chunk: int = 0,
    out_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    stats: Stats | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the decoded planes plus offsets, or over the exact pool for the pairs that it serves.

    Shapes as `decode`; planes (P, Hkv, N, ...), k_offsets (P, Hkv, D), exact pool (Pe, Ne, Hkv, D), its table (B, W).
    """
    out, lse = _empty_state(q, dtype)
    for b, index in enumerate(_queries(q, cu_seqlens_q, seqlens.shape[0])):
        queries = q[index].to(dtype)
        q_len, kv_len, start = len(queries), int(seqlens[b]), 0 if kv_start is None else int(kv_start[b])
        visible = visible_keys(q_len, kv_len, kv_start=start, causal=causal, window_left=window_left)
        exact = torch.zeros_like(visible)
        if exact_first > 0 or exact_last > 0:
            key, position = torch.arange(kv_len), torch.arange(q_len)[:, None] + (kv_len - q_len)
            entries = key // exact_k.shape[1]  # a token past the table has no entry either
            page = torch.full((kv_len,), -1)
            known = entries < exact_block_table.shape[1]
            page[known] = exact_block_table[b].cpu().long()[entries[known]]
            exact = (key < start + exact_first) | ((exact_last > 0) & (key > position - exact_last))
            exact &= visible & (page >= 0) & (page < exact_k.shape[0])

        coded = visible & ~exact
        keys = queries.new_zeros(2, kv_len, k_codes.shape[1], q.shape[-1])  # the decoded k and v that somebody reads
        offsets = torch.zeros_like(keys[0])
        tokens = coded.any(0).nonzero()[:, 0].to(q.device)
        pages, slots = _locate(tokens, k_codes.shape[2], k_codes.shape[0], block_table, b)
        keys[0, tokens] = tbq4_dequantize(k_codes[pages, :, slots], k_norms[pages, :, slots]).to(dtype)
        keys[1, tokens] = tbq4_dequantize(v_codes[pages, :, slots], v_norms[pages, :, slots]).to(dtype)
        if k_offsets is not None:
            offsets[tokens] = k_offsets[pages].to(dtype)
        raw = torch.zeros_like(keys)  # the same of the exact pool
        if exact.any():
            tokens = exact.any(0).nonzero()[:, 0]
            at = page[tokens].to(q.device), (tokens % exact_k.shape[1]).to(q.device)
            raw[0, tokens.to(q.device)], raw[1, tokens.to(q.device)] = exact_k[at].to(dtype), exact_v[at].to(dtype)

        visible, exact, coded = visible.to(q.device), exact.to(q.device), coded.to(q.device)
        scores = torch.where(exact, _scores(queries, raw[0]), _scores(queries, keys[0]))
        by_offset = torch.where(coded, _scores(queries, offsets), 0)
        weights, part = _attend(queries, scores, visible, sinks, scale, softcap, stats, by_offset)
        out[index] = _weigh(torch.where(coded, weights, 0), keys[1], coded) + _weigh(
            torch.where(exact, weights, 0), raw[1], exact
        )
        _store_lse(lse, index, part)
    return out if out_dtype is None else out.to(out_dtype), lse


# --- merge ------------------------------------------------------------------------------------------------------------


def merge_states(outs: Tensor, lses: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """outs (K, ..., S, H, D), lses (K, ..., H, S): attention over the union of K disjoint sets of keys.

    A partial whose lse is -inf saw nothing: its out is ignored, whatever it holds. No partial at all: (0, -inf).
    """
    outs, lses = outs.to(dtype), lses.to(dtype)
    if outs.shape[0] == 0:
        return _empty_state(outs[:0].sum(0), dtype)
    dead = lses == float("-inf")
    top = lses.amax(0)  # of a NaN and a number: NaN
    weights = torch.where(dead, 0, torch.exp(lses - torch.where(top == float("-inf"), 0, top)))
    total = weights.sum(0)
    lse = torch.where(dead.all(0), float("-inf"), top + total.log())
    # The weighted mean, (K, ..., S, H, D); a lone partial has weight exactly 1.
    shares = torch.where(dead, 0, weights / total).transpose(-1, -2)[..., None]
    return torch.where(dead.transpose(-1, -2)[..., None], 0, shares * outs).sum(0), lse
