"""decode against the reference, on shuffled pages with NaN and garbage wherever nobody may look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import check_16bit
from cases import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LAYOUTS,
    PAGE_SIZES,
    SCALES,
    SINKS,
    case_id,
    everywhere,
    first_visible,
    lay_out,
    make_sinks,
    page_out,
    pairwise,
    plain_dtype,
    randn,
    with_cuda,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flashq.cli.machine import cpu_levels

ISAS = cpu_levels().available
INDEX_DTYPES = (torch.int32, torch.int64)

VALUES = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "group": GROUPS,
    "q_len": (1, 2, 5, 16, 17, 0),
    "lengths": ((300, 1, 64), (17, 0, 130), (600, 33, 5), (0, 0, 0), (63, 65, 257)),
    "page_size": (*PAGE_SIZES, None),  # None: no table, sequence b is page b
    "mask": ((True, -1), (False, -1), (True, 40), (False, 0), (True, 0)),
    "kv_start": (False, True),
    "softcap": (0.0, 15.0),
    "sinks": SINKS,
    "scale": SCALES,
    "kv_chunk": (0, 256, 320),
    "out_dtype": (None, torch.float32),
    "index_dtype": INDEX_DTYPES,
    "layout": LAYOUTS,
    "threads": (2, 1, 3),
}
CASES = with_cuda(pairwise(backend=ISAS, **VALUES), **VALUES | {"dtype": DTYPES[1:]})


@pytest.mark.contract(1, 2, 3, 4, 5, 6, 8, 9, 10)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decode(case: dict, enter_backend: Callable[[str], torch.device]) -> None:
    device = enter_backend(case["backend"])
    kv_heads, dim, dtype, lengths = 1 if case["group"] > 8 else 2, case["head_dim"], case["dtype"], case["lengths"]
    heads = kv_heads * case["group"]
    start = [n // 3 for n in lengths] if case["kv_start"] else None
    keys, values = ([randn(n, kv_heads, dim, dtype=dtype, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 11))
    if case["page_size"] is None:
        caches = [torch.full((4, max(lengths) + 3, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
        for cache, rows in zip(caches, (keys, values), strict=True):
            for b, tokens in enumerate(rows):
                cache[b, : len(tokens)] = tokens
        k, v = (lay_out(cache, case["layout"]) for cache in caches)
        table, seqlens = None, torch.tensor(lengths, dtype=case["index_dtype"])
    else:
        k, v, table, seqlens = page_out(
            keys,
            values,
            case["page_size"],
            index_dtype=case["index_dtype"],
            layout=case["layout"],
            kv_start=start,
            first_seen=[
                first_visible(n, case["q_len"], start[b] if start else 0, case["mask"][1])
                for b, n in enumerate(lengths)
            ],
        )
    check_16bit(
        "decode",
        lay_out(randn(3, case["q_len"], heads, dim, dtype=dtype), case["layout"]),
        k,
        v,
        seqlens,
        table,
        None,
        None if start is None else torch.tensor(start, dtype=case["index_dtype"]),
        make_sinks(case["sinks"], heads),
        threads=case["threads"],
        device=device,
        causal=case["mask"][0],
        window_left=case["mask"][1],
        **{name: case[name] for name in ("scale", "softcap", "kv_chunk", "out_dtype")},
    )


PACKED_VALUES = {
    "dtype": DTYPES,
    "head_dim": (64, 128, 80, 256),
    "group": GROUPS,
    "q_lengths": ((1, 1, 1), (5, 0, 2), (16, 1, 33), (0, 0, 0), (70, 2, 1)),
    "lengths": ((300, 1, 64), (17, 0, 130), (600, 33, 5)),
    "page_size": PAGE_SIZES,
    "window": (-1, 20),
    "kv_chunk": (0, 256),
    "kv_start": (False, True),
    "index_dtype": INDEX_DTYPES,
    "tail": (0, 3),
    "hint": (0, 1, 100),
}
PACKED_CASES = with_cuda(pairwise(backend=ISAS, **PACKED_VALUES), **PACKED_VALUES | {"dtype": DTYPES[1:]})


@pytest.mark.contract(4, 5, 8, 9)
@pytest.mark.parametrize("case", PACKED_CASES, ids=case_id)
def test_decode_of_packed_queries(case: dict, enter_backend: Callable[[str], torch.device]) -> None:
    device = enter_backend(case["backend"])
    kv_heads, dim, dtype, lengths = 1 if case["group"] > 8 else 2, case["head_dim"], case["dtype"], case["lengths"]
    heads, index_dtype, tail = kv_heads * case["group"], case["index_dtype"], case["tail"]
    start = [n // 2 for n in lengths] if case["kv_start"] else None
    keys, values = ([randn(n, kv_heads, dim, dtype=dtype, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 11))
    cache = page_out(keys, values, case["page_size"], index_dtype=index_dtype, kv_start=start)
    cu_q = torch.tensor([0, *case["q_lengths"]], dtype=index_dtype).cumsum(0, dtype=index_dtype)
    out, lse = check_16bit(
        "decode",
        randn(int(cu_q[-1]) + tail, heads, dim, dtype=dtype),
        *cache[:2],
        cache.seqlens,
        cache.block_table,
        cu_q,
        None if start is None else torch.tensor(start, dtype=index_dtype),
        make_sinks("some", heads),
        max_seqlen_q=case["hint"],
        device=device,
        window_left=case["window"],
        kv_chunk=case["kv_chunk"],
    )
    if tail:
        assert torch.equal(out[-tail:], torch.zeros_like(out[-tail:]))
        assert (lse[:, -tail:] == float("-inf")).all()


@pytest.mark.contract(4)
@everywhere(group=[128, 131], q_len=[1, 3])
def test_many_query_heads_a_kv_head(group: int, q_len: int, backend: torch.device) -> None:
    dtype = plain_dtype(backend)
    cache = page_out([randn(70, 1, 64, dtype=dtype)], [randn(70, 1, 64, seed=1, dtype=dtype)], 16)
    q = randn(1, q_len, group, 64, seed=2, dtype=dtype)
    check_16bit("decode", q, *cache[:2], cache.seqlens, cache.block_table, device=backend)


SIZES = {
    "lengths": st.lists(st.integers(0, 400), max_size=4),
    "q_len": st.integers(0, 20),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 9),
    "head_dim": st.integers(1, 32).map(lambda n: 8 * n),
    "page_size": st.integers(1, 300),
    "causal": st.booleans(),
    "left": st.integers(-1, 90),
    "kv_chunk": st.sampled_from([0, 256, 384]),
    "seed": st.integers(0, 2**32),
}


def check_any_size(
    device: str, dtype: torch.dtype, lengths: list[int], q_len: int, kv_heads: int, group: int, head_dim: int,
    page_size: int, causal: bool, left: int, kv_chunk: int, seed: int,
) -> None:  # fmt: skip
    keys, values = (
        [randn(n, kv_heads, head_dim, dtype=dtype, seed=seed + s + i) for i, n in enumerate(lengths)] for s in (1, 11)
    )
    q = randn(len(lengths), q_len, kv_heads * group, head_dim, dtype=dtype, seed=seed)
    empty = torch.empty(0, kv_heads, head_dim, dtype=dtype)
    cache = page_out(keys or [empty], values or [empty], page_size, seed=seed)
    table, seqlens = cache.block_table[: len(lengths)], cache.seqlens[: len(lengths)]
    options = {"causal": causal, "window_left": left, "kv_chunk": kv_chunk}
    check_16bit("decode", q, *cache[:2], seqlens, table, device=device, **options)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(dtype=st.sampled_from(DTYPES), **SIZES)
def test_decode_of_any_size(**case: Any) -> None:
    check_any_size("cpu", **case)


@pytest.mark.cuda
@settings(deadline=None, max_examples=200, derandomize=True)
@given(dtype=st.sampled_from(DTYPES[1:]), **SIZES)
def test_decode_of_any_size_on_cuda(**case: Any) -> None:
    check_any_size("cuda", **case)
