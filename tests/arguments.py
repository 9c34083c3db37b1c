"""Arguments that the ops accept, and values of index tensors that they do not."""

from __future__ import annotations

from typing import Any

import torch

B, S, L, HQ, HKV, D, P, N = 2, 3, 9, 4, 2, 64, 3, 8
Arguments = dict[str, Any]


def plane_arguments() -> Arguments:
    codes, norms = torch.zeros(P, HKV, N, D // 2, dtype=torch.uint8), torch.zeros(P, HKV, N, 1, dtype=torch.float16)
    return {"k_codes": codes, "k_norms": norms, "v_codes": codes.clone(), "v_norms": norms.clone()}


def index_arguments() -> Arguments:
    return {
        "seqlens": torch.tensor([L, N]),
        "block_table": torch.tensor([[0, 1], [2, 0]]),
        "cu_seqlens_q": None,
        "kv_start": torch.tensor([1, 0]),
        "sinks": torch.zeros(HQ),
    }


def good(op: str) -> Arguments:
    """Arguments that the op accepts."""
    q = torch.randn(B, S, HQ, D, dtype=torch.bfloat16)
    kv = torch.randn(B, L, HKV, D, dtype=torch.bfloat16)
    cache = torch.randn(P, N, HKV, D, dtype=torch.bfloat16)
    if op == "prefill":
        return {"q": q, "k": kv, "v": kv.clone(), "sinks": torch.zeros(HQ)}
    if op == "prefill_varlen":
        cu_q, cu_k = torch.tensor([0, S, B * S]), torch.tensor([0, L, B * L])
        packed = {"q": q.flatten(0, 1), "k": kv.flatten(0, 1), "v": kv.flatten(0, 1)}
        return packed | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "sinks": torch.zeros(HQ)}
    if op == "decode":
        return {"q": q, "k_cache": cache, "v_cache": cache.clone()} | index_arguments()
    if op == "tbq4_attention":
        exact = {"exact_k": cache, "exact_v": cache.clone(), "exact_block_table": torch.tensor([[0, 1], [2, 0]])}
        offsets = {"k_offsets": torch.zeros(P, HKV, D, dtype=torch.float16)}
        return {"q": q} | plane_arguments() | index_arguments() | offsets | exact | {"exact_first": 2, "exact_last": 2}
    if op == "kv_append_":
        return {"k": cache[0], "v": cache[1], "k_cache": cache, "v_cache": cache.clone(), "slots": torch.arange(N)}
    if op == "tbq4_append_":
        offsets = {"k_offsets": torch.zeros(P, HKV, D, dtype=torch.float16)}
        return {"k": cache[0], "v": cache[1]} | plane_arguments() | {"slots": torch.arange(N)} | offsets
    if op == "tbq4_rope_append_":
        queries = {"q": q.flatten(0, 1)[:1].expand(N, HQ, D).clone(), "k": cache[0].clone(), "v": cache[1].clone()}
        tables = {"cos": torch.zeros(L, D // 4), "sin": torch.zeros(L, D // 4), "positions": torch.arange(N)}
        offsets = {"k_offsets": torch.zeros(P, HKV, D, dtype=torch.float16)}
        exact = {"exact_k": cache, "exact_v": cache.clone(), "exact_slots": torch.arange(N)}
        return queries | tables | plane_arguments() | {"slots": torch.arange(N)} | offsets | exact
    if op == "tbq4_page_offsets_":
        planes, index = plane_arguments(), index_arguments()
        offsets = {"k_offsets": torch.zeros(P, HKV, D, dtype=torch.float16)}
        exact = {"exact_k": cache, "exact_block_table": torch.tensor([[0, 1], [2, 0]])}
        lengths = {
            "seqlens": index["seqlens"],
            "block_table": index["block_table"],
            "cu_seqlens": torch.tensor([0, 5, N]),
        }
        keys = {"k": cache[0].clone(), "k_codes": planes["k_codes"], "k_norms": planes["k_norms"]}
        return keys | offsets | lengths | {"kv_start": index["kv_start"]} | exact
    if op == "merge_states":
        return {"outs": torch.randn(3, B, S, HQ, D), "lses": torch.randn(3, B, HQ, S)}
    if op == "tbq4_dequantize":
        return {"codes": torch.zeros(5, D // 2, dtype=torch.uint8), "norms": torch.zeros(5, 1, dtype=torch.float16)}
    return {"x": q}  # tbq4_quantize, tbq4_rotate


INDEX_VALUES: list[tuple[str, str, list, str, str]] = [
    ("decode", "seqlens", [L, 2 * N + 1], "capacity of 16", "17"),
    ("decode", "seqlens", [-1, N], "from 0", "-1"),
    ("decode", "kv_start", [L + 1, 0], f"length {L}", str(L + 1)),
    ("decode", "kv_start", [0, -1], "from 0", "-1"),
    ("decode", "block_table", [[0, 3], [2, 0]], "page from 0 to 2", "3"),
    ("decode", "block_table", [[0, 1], [-1, 0]], "page from 0 to 2", "-1"),
    ("tbq4_attention", "seqlens", [L, 2 * N + 1], "capacity of 16", "17"),
    ("tbq4_attention", "kv_start", [L + 1, 0], f"length {L}", str(L + 1)),
    ("tbq4_attention", "block_table", [[2147480000, 1], [0, 0]], "page from 0 to 2", "2147480000"),
    ("tbq4_page_offsets_", "seqlens", [L, 2 * N + 1], "capacity of 16", "17"),
    ("tbq4_page_offsets_", "seqlens", [4, N], "at least the 5 keys of this append", "4"),
    ("tbq4_page_offsets_", "kv_start", [0, N + 1], f"length {N}", str(N + 1)),
    ("tbq4_page_offsets_", "block_table", [[0, 3], [2, 0]], "page from 0 to 2", "3"),
    ("tbq4_page_offsets_", "cu_seqlens", [0, 5, N + 1], "to 8", "9"),
    ("tbq4_page_offsets_", "cu_seqlens", [0, 5, 4], "from 5", "4"),
    ("kv_append_", "slots", [0, 1, 2, 3, 4, 5, 6, P * N], "below the cache's 24", "24"),
    ("tbq4_append_", "slots", [0, 1, 2, 3, 4, 5, 6, P * N], "below the cache's 24", "24"),
    ("tbq4_rope_append_", "slots", [0, 1, 2, 3, 4, 5, 6, P * N], "below the cache's 24", "24"),
    ("tbq4_rope_append_", "exact_slots", [0, 1, 2, 3, 4, 5, -6, P * N], "below the cache's 24", "24"),
    ("tbq4_rope_append_", "positions", [0, 1, 2, 3, 4, 5, 6, L], f"position from 0 to {L - 1}", str(L)),
    ("tbq4_rope_append_", "positions", [0, 1, -1, 3, 4, 5, 6, 7], f"position from 0 to {L - 1}", "-1"),
    ("prefill_varlen", "cu_seqlens_q", [1, S, B * S], "0", "1"),
    ("prefill_varlen", "cu_seqlens_q", [0, S, S - 1], "from 3", "2"),
    ("prefill_varlen", "cu_seqlens_q", [0, S, B * S + 1], "to 6", "7"),
    ("prefill_varlen", "cu_seqlens_k", [0, L, B * L + 1], "to 18", "19"),
]
"""(op, argument, its values, part of what is expected, the value that is named), otherwise the arguments of `good`."""


def bad(op: str, name: str, values: list, index_dtype: torch.dtype = torch.int64) -> Arguments:
    """The good arguments with one row of INDEX_VALUES."""
    arguments = good(op) | {name: torch.tensor(values, dtype=index_dtype)}
    # Otherwise no query would need the page from the codes.
    return arguments | ({"exact_first": 0, "exact_last": 0} if op == "tbq4_attention" else {})
