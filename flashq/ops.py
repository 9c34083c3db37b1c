"""The public functions: thin wrappers over ``torch.ops.flashq``, one an op, with the same arguments and names.

Notation: B sequences, Sq and Sk query and key tokens, Hq and Hkv query and KV heads (Hq % Hkv == 0; query head h reads
KV head h // (Hq / Hkv)), D head dim, T packed tokens, P pages of N tokens. A sequence's length L counts the tokens in
its cache, its query tokens included.

All of them raise RuntimeError ``flashq::op: argument: expected ..., got ...`` for an argument that does not fit: a
shape, a dtype, a device, a last stride that is not 1, an option out of its range, on the CPU also a length, page or
slot out of its range, and a tensor that requires grad while gradients are recorded. Index tensors (lengths, tables,
slots) are int32 or int64 on the device of the others. Outputs are new contiguous tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
) -> tuple[Tensor, Tensor]:
    """Softmax attention of a batch of sequences of one length.

    Args:
        q: (B, Sq, Hq, D), fp16 or bf16, on the CPU also fp32; D a multiple of 8 up to 256.
        k, v: (B, Sk, Hkv, D), q's dtype.
        sinks: fp32 (Hq), one more logit a head that takes part in the denominator only; neither scaled nor capped.
        scale: factor of q.k, None: D ** -0.5.
        causal: query i sees key j when j <= i + Sk - Sq (the last query sees every key).
        window_left, window_right: query i sees keys from i + Sk - Sq - window_left to i + Sk - Sq + window_right,
            both inclusive; -1: unlimited.
        softcap: s = softcap * tanh(s / softcap) before the mask; 0: off.

    Returns:
        out (B, Sq, Hq, D) in q's dtype, and lse fp32 (B, Hq, Sq): the natural logarithm of the sum of exp(score), sink
        included. A row that sees no key: out 0, lse -inf (or its sink).
    """
    return torch.ops.flashq.prefill(
        q,
        k,
        v,
        sinks,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )


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
) -> tuple[Tensor, Tensor]:
    """`prefill` of sequences of different lengths, packed one after another.

    Args:
        q: (Tq, Hq, D).
        k, v: (Tk, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1), where every sequence starts: from 0, not falling. Queries at or past the
            last entry belong to nobody: out 0, lse -inf.
        max_seqlen_q, max_seqlen_k: hints, 0: unknown; results do not depend on them.
        sinks, scale, causal, window_left, window_right, softcap: as in `prefill`, for each sequence on its own.

    Returns:
        out (Tq, Hq, D) in q's dtype, lse fp32 (Hq, Tq).
    """
    return torch.ops.flashq.prefill_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        sinks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )


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
) -> tuple[Tensor, Tensor]:
    """Attention of a few new queries over a cache, each sequence split over its keys; any number of queries works.

    Args:
        q: (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q; fp16 or bf16, on the CPU also fp32. A sequence's
            queries are its last tokens; their keys are in the cache already.
        k_cache, v_cache: (P, N, Hkv, D) in q's dtype, pages of any strides (last one 1).
        seqlens: (B), the lengths L. Bytes past them never matter.
        block_table: (B, max_pages), the pages of each sequence in order; None: sequence b is page b.
        cu_seqlens_q: (B + 1), where every sequence's queries start.
        kv_start: (B), keys before it are invisible (left padding); positions do not move.
        sinks, scale, causal, window_left, softcap: as in `prefill`; query i of a sequence stands at L - Sq + i.
        max_seqlen_q: a hint, 0: unknown.
        kv_chunk: tokens a split, a multiple of 64 from 256 on: then a row's bits do not depend on the rest of the
            batch; 0: chosen from the sizes.
        out_dtype: None (q's dtype) or torch.float32, e.g. for partials that `merge_states` combines.

    Returns:
        out as q, lse fp32 (B, Hq, Sq), packed (Hq, Tq).
    """
    return torch.ops.flashq.decode(
        q,
        k_cache,
        v_cache,
        seqlens,
        block_table,
        cu_seqlens_q,
        kv_start,
        sinks,
        max_seqlen_q=max_seqlen_q,
        scale=scale,
        causal=causal,
        window_left=window_left,
        softcap=softcap,
        kv_chunk=kv_chunk,
        out_dtype=out_dtype,
    )


def kv_append_(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write new keys and values into a paged cache, in place.

    Args:
        k, v: (T, Hkv, D), fp16, bf16 or fp32.
        k_cache, v_cache: (P, N, Hkv, D) in k's dtype; written.
        slots: (T), page * N + offset for each token, negative: skip. Of repeated slots an undefined one wins.
    """
    torch.ops.flashq.kv_append_(k, v, k_cache, v_cache, slots)


def tbq4_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows in TBQ4: 4 bits a value and one fp16 norm a block.

    Args:
        x: (..., D), fp16, bf16 or fp32; D 64, 128 or 256. A block with a NaN or an Inf decodes to NaN; norms above
            65504 saturate.

    Returns:
        codes uint8 (..., D / 2) and norms fp16 (..., D / block), block 64 for D = 64, else 128. The same bytes on every
        device.
    """
    return torch.ops.flashq.tbq4_quantize(x)


def tbq4_dequantize(codes: Tensor, norms: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Decode what `tbq4_quantize` made.

    Args:
        codes: uint8 (..., D / 2).
        norms: fp16 (..., D / block).
        dtype: fp32 (None), fp16 or bf16; the exact fp32 value is rounded once.

    Returns:
        (..., D), about 0.9 % off in the mean square (`flashq.tbq4.EXPECTED_ERROR`).
    """
    return torch.ops.flashq.tbq4_dequantize(codes, norms, dtype=dtype)


def tbq4_rotate(x: Tensor, *, inverse: bool = False) -> Tensor:
    """The rotation inside TBQ4, block by block; orthogonal, so q.k = rotate(q).rotate(k).

    Args:
        x: (..., D), fp16, bf16 or fp32; D 64, 128 or 256.
        inverse: undo the rotation.

    Returns:
        (..., D) in x's dtype, computed in fp32.
    """
    return torch.ops.flashq.tbq4_rotate(x, inverse=inverse)


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
    """Encode new keys and values into a paged TBQ4 cache, in place.

    Args:
        k, v: (T, Hkv, D), fp16, bf16 or fp32; D 64, 128 or 256.
        k_codes, v_codes: uint8 (P, Hkv, N, D / 2), contiguous; written.
        k_norms, v_norms: fp16 (P, Hkv, N, D / block), contiguous; written.
        slots: (T), page * N + offset for each token, negative: skip. Of repeated slots an undefined one wins.
        k_offsets: fp16 (P, Hkv, D), a vector that is taken off every key of its page before encoding (in fp32); fix it
            before the page's first token and hand the same to `tbq4_attention`.
    """
    torch.ops.flashq.tbq4_append_(k, v, k_codes, k_norms, v_codes, v_norms, slots, k_offsets)


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
    """Rotary embedding of new queries and keys, `tbq4_append_` and, for the exact pool, `kv_append_`, in one launch.

    A pair (a, b) of a head's elements becomes (a cos - b sin, b cos + a sin), in fp32, rounded once to q's dtype; those
    keys are what the caches get, as if another op had made them. q, k and v stay as they are. Made for decode steps;
    any number of tokens is right.

    Args:
        q: (T, Hq, D), fp16, bf16 or fp32; D 64, 128 or 256.
        k, v: (T, Hkv, D), in q's dtype.
        cos, sin: (max_position, rotary_dim / 2), fp32 or in q's dtype. Elements from rotary_dim on do not turn.
        positions: (T), rows of cos and sin. On CUDA one outside of them gives NaN, in q and in the key.
        k_codes, v_codes, k_norms, v_norms, slots, k_offsets: as in `tbq4_append_`; the first four are written.
        exact_k, exact_v: (Pe, Ne, Hkv, D) in q's dtype, free strides, as in `tbq4_attention`; written: keys that have
            turned, without an offset, and values.
        exact_slots: (T), page * Ne + offset, negative: skip; together with exact_k and exact_v.
        interleaved: pairs are elements 2 i and 2 i + 1 (GPT-J), not i and i + rotary_dim / 2 (Llama, GPT-NeoX).

    Returns:
        q with its rotary embedding, (T, Hq, D).
    """
    return torch.ops.flashq.tbq4_rope_append_(
        q,
        k,
        v,
        cos,
        sin,
        positions,
        k_codes,
        k_norms,
        v_codes,
        v_norms,
        slots,
        k_offsets,
        exact_k,
        exact_v,
        exact_slots,
        interleaved=interleaved,
    )


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
    """Fix the key offsets of the pages that an append opens, in place; to be called before its `tbq4_append_`.

    A page is opened by the append that brings its first key from kv_start on. Its offset is the mean of its own keys if
    this append fills it, or if there is no key before it; else the mean of the last min(64, available) keys before it:
    of this append, exact where the pool holds them, else decoded; those whose page the table has no longer (an entry
    outside [0, P)) do not count. Elements that are NaN or Inf do not count either. fp32 sums in the order of positions,
    rounded to fp16 and clamped to its range: the same bits on every device.

    Args:
        k: (T, Hkv, D), the keys of the append; fp16, bf16 or fp32; D 64, 128 or 256.
        k_codes: uint8 (P, Hkv, N, D / 2), contiguous; the earlier keys.
        k_norms: fp16 (P, Hkv, N, D / block), contiguous.
        k_offsets: fp16 (P, Hkv, D); written where a page is opened, read where earlier keys are decoded.
        seqlens: (B), the lengths with this append.
        block_table: (B, max_pages).
        cu_seqlens: (B + 1), where every sequence's keys start in k.
        kv_start: (B), keys before it do not count (left padding).
        exact_k: (Pe, Ne, Hkv, D) in k's dtype, earlier keys as they were.
        exact_block_table: (B, W), as in `tbq4_attention`; together with exact_k.
    """
    torch.ops.flashq.tbq4_page_offsets_(
        k, k_codes, k_norms, k_offsets, seqlens, block_table, cu_seqlens, kv_start, exact_k, exact_block_table
    )


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
) -> tuple[Tensor, Tensor]:
    """`decode` over a TBQ4 cache, read straight from its codes; some tokens may be read from an exact pool instead.

    Args:
        q: (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q; fp16 or bf16, on the CPU also fp32; D 64, 128, 256.
        k_codes, v_codes: uint8 (P, Hkv, N, D / 2), contiguous.
        k_norms, v_norms: fp16 (P, Hkv, N, D / block), contiguous.
        seqlens, block_table, cu_seqlens_q, kv_start, sinks: as in `decode`.
        k_offsets: fp16 (P, Hkv, D), what `tbq4_append_` took off the keys; scores get q.offset back, in fp32.
        exact_k, exact_v: (Pe, Ne, Hkv, D) in q's dtype, raw keys and values of some tokens.
        exact_block_table: (B, W): token t is page exact_block_table[b, t // Ne], slot t % Ne of the exact pool; an
            entry outside [0, Pe) sends its tokens back to the codes.
        exact_first: the first so many keys from kv_start on are read exactly.
        exact_last: so are keys j > p - exact_last of a query at position p.
        max_seqlen_q, scale, causal, window_left, softcap, kv_chunk, out_dtype: as in `decode`.

    Returns:
        out as q, lse fp32 (B, Hq, Sq), packed (Hq, Tq).
    """
    return torch.ops.flashq.tbq4_attention(
        q,
        k_codes,
        k_norms,
        v_codes,
        v_norms,
        seqlens,
        block_table,
        cu_seqlens_q,
        kv_start,
        sinks,
        k_offsets,
        exact_k,
        exact_v,
        exact_block_table,
        exact_first=exact_first,
        exact_last=exact_last,
        max_seqlen_q=max_seqlen_q,
        scale=scale,
        causal=causal,
        window_left=window_left,
        softcap=softcap,
        kv_chunk=kv_chunk,
        out_dtype=out_dtype,
    )


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over K disjoint sets of keys into attention over all of them.

    Args:
        outs: (K, B, S, H, D) or (K, T, H, D), fp16, bf16 or fp32.
        lses: fp32 (K, B, H, S) or (K, H, T), natural logarithms. A partial with lse -inf is left out, whatever its out
            holds. A sink may be in one partial only.

    Returns:
        out (B, S, H, D) or (T, H, D) in outs' dtype, lse fp32; (0, -inf) for K = 0.
    """
    return torch.ops.flashq.merge_states(outs, lses)
