"""prefill and prefill_varlen against the reference, in every pair of options, strides and instruction sets."""

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
    SCALES,
    SINKS,
    case_id,
    everywhere,
    lay_out,
    make_sinks,
    pairwise,
    randn,
    with_cuda,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flashq.cli.machine import cpu_levels

ISAS = cpu_levels().available
# (causal, window_left, window_right)
MASKS = ((False, -1, -1), (True, -1, -1), (True, 17, -1), (False, 5, 9), (False, -1, 3), (True, 0, 4), (False, 70, -1))


def options_of(case: dict) -> dict:
    causal, left, right = case["mask"]
    options = {name: case[name] for name in ("scale", "softcap")}
    return options | {"causal": causal, "window_left": left, "window_right": right}


VALUES = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "group": GROUPS,
    "lengths": ((33, 33), (64, 128), (1, 1), (1, 130), (5, 3), (100, 65), (0, 7), (7, 0), (65, 64), (16, 257)),
    "mask": MASKS,
    "softcap": (0.0, 15.0),
    "sinks": SINKS,
    "scale": SCALES,
    "q_layout": LAYOUTS,
    "kv_layout": LAYOUTS,
    "threads": (2, 1, 3),
}
CASES = with_cuda(pairwise(backend=ISAS, **VALUES), **VALUES | {"dtype": DTYPES[1:]})


@pytest.mark.contract(1, 2, 3, 4, 5, 6)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prefill(case: dict, enter_backend: Callable[[str], torch.device]) -> None:
    device = enter_backend(case["backend"])
    (sq, sk), kv_heads, dim = case["lengths"], 1 if case["group"] > 8 else 2, case["head_dim"]
    heads, dtype = kv_heads * case["group"], case["dtype"]
    q = lay_out(randn(2, sq, heads, dim, dtype=dtype), case["q_layout"])
    k, v = (lay_out(randn(2, sk, kv_heads, dim, dtype=dtype, seed=i), case["kv_layout"]) for i in (1, 2))
    sinks = make_sinks(case["sinks"], heads)
    check_16bit("prefill", q, k, v, sinks, threads=case["threads"], device=device, **options_of(case))


VARLEN_VALUES = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "group": GROUPS,
    "q_lengths": ((5, 0, 33), (1, 1, 1), (64, 2, 7), (0, 0, 0), (70, 3, 1)),
    "k_lengths": ((5, 9, 60), (0, 1, 130), (64, 0, 5), (0, 0, 0), (130, 1, 2)),
    "mask": MASKS,
    "softcap": (0.0, 15.0),
    "sinks": SINKS,
    "index_dtype": (torch.int32, torch.int64),
    "layout": LAYOUTS,
    "tail": (0, 5),  # rows that belong to no sequence
    "hint": (0, 1, 4096),
}
VARLEN_CASES = with_cuda(pairwise(backend=ISAS, **VARLEN_VALUES), **VARLEN_VALUES | {"dtype": DTYPES[1:]})


@pytest.mark.contract(1, 2, 3, 4, 5, 6, 9, 14)
@pytest.mark.parametrize("case", VARLEN_CASES, ids=case_id)
def test_prefill_varlen(case: dict, enter_backend: Callable[[str], torch.device]) -> None:
    device = enter_backend(case["backend"])
    kv_heads, dim, dtype, tail = 1 if case["group"] > 8 else 2, case["head_dim"], case["dtype"], case["tail"]
    heads = kv_heads * case["group"]
    cu_q, cu_k = (
        torch.tensor([0, *lengths], dtype=case["index_dtype"]).cumsum(0, dtype=case["index_dtype"])
        for lengths in (case["q_lengths"], case["k_lengths"])
    )
    q = lay_out(randn(int(cu_q[-1]) + tail, heads, dim, dtype=dtype), case["layout"])
    k, v = (lay_out(randn(int(cu_k[-1]) + tail, kv_heads, dim, dtype=dtype, seed=i), case["layout"]) for i in (1, 2))
    if tail and case["layout"] != "one_head":
        k[-tail:] = float("nan")
        v[-tail:] = float("nan")
    sinks = make_sinks(case["sinks"], heads)
    options = options_of(case | {"scale": None})
    hints = {"max_seqlen_q": case["hint"], "max_seqlen_k": case["hint"]}
    out, lse = check_16bit("prefill_varlen", q, k, v, cu_q, cu_k, sinks, device=device, **hints, **options)
    if tail:
        assert torch.equal(out[-tail:], torch.zeros_like(out[-tail:]))
        assert (lse[:, -tail:] == float("-inf")).all()


@pytest.mark.contract(4)
@everywhere(group=[128, 131])
def test_many_query_heads_a_kv_head(group: int, backend: torch.device) -> None:
    q = randn(1, 3, group, 64, dtype=torch.bfloat16)
    k, v = (randn(1, 70, 1, 64, dtype=torch.bfloat16, seed=i) for i in (1, 2))
    check_16bit("prefill", q, k, v, causal=True, device=backend)


SIZES = {
    "batch": st.integers(0, 3),
    "sq": st.integers(0, 80),
    "sk": st.integers(0, 150),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 9),
    "head_dim": st.integers(1, 32).map(lambda n: 8 * n),
    "causal": st.booleans(),
    "left": st.integers(-1, 90),
    "right": st.integers(-1, 90),
    "seed": st.integers(0, 2**32),
}


def check_any_size(
    device: str, dtype: torch.dtype, batch: int, sq: int, sk: int, kv_heads: int, group: int, head_dim: int,
    causal: bool, left: int, right: int, seed: int,
) -> None:  # fmt: skip
    q = randn(batch, sq, kv_heads * group, head_dim, dtype=dtype, seed=seed)
    k, v = (randn(batch, sk, kv_heads, head_dim, dtype=dtype, seed=seed + i) for i in (1, 2))
    check_16bit("prefill", q, k, v, causal=causal, window_left=left, window_right=right, device=device)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(dtype=st.sampled_from(DTYPES), **SIZES)
def test_prefill_of_any_size(**case: Any) -> None:
    check_any_size("cpu", **case)


@pytest.mark.cuda
@settings(deadline=None, max_examples=200, derandomize=True)
@given(dtype=st.sampled_from(DTYPES[1:]), **SIZES)
def test_prefill_of_any_size_on_cuda(**case: Any) -> None:
    check_any_size("cuda", **case)
