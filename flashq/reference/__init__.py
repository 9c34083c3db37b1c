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

from flashq.reference.appends import kv_append_, tbq4_append_, tbq4_page_offsets_, tbq4_rope_append_
from flashq.reference.tbq4 import tbq4_dequantize, tbq4_quantize, tbq4_rotate

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
    "tbq4_rope_append_",
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


# --- TBQ4 -------------------------------------------------------------------------------------------------------------


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
