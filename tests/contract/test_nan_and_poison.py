"""Where NaN, Inf and bytes that nothing needs may go (docs/contract.md, lines 7 and 8)."""

from __future__ import annotations

import math

import golden
import pytest
import torch
from accuracy import using_threads
from cases import (
    ATTENTION,
    DTYPES,
    INF,
    NAN,
    Paged,
    attend,
    call,
    encode_pages,
    everywhere,
    page_out,
    plain_dtype,
    randn,
)

import flashq
from flashq import reference


@pytest.mark.contract(7)
@everywhere(op=["prefill", "decode"], dtype=DTYPES)
def test_nan_goes_where_it_must_and_nowhere_else(op: str, dtype: torch.dtype, backend: torch.device) -> None:
    batch, length, dim = 2, 130, 64
    q, k, v = (randn(batch, length, h, dim, dtype=dtype, seed=h) for h in (4, 2, 2))
    clean, clean_lse = attend(op, q, k, v, device=backend, causal=True)
    # In a query: that row.
    bad = q.clone()
    bad[0, 70, 1, 3] = NAN
    out, lse = attend(op, bad, k, v, device=backend, causal=True)
    assert out[0, 70, 1].isnan().all()
    assert lse[0, 1, 70].isnan()
    assert out.isnan().sum() == dim
    assert lse.isnan().sum() == 1
    # In a key: every row that sees it.
    bad = k.clone()
    bad[0, 70, 1, 3] = NAN
    out, lse = attend(op, q, bad, v, device=backend, causal=True)
    assert out[0, 70:, 2:].isnan().all()
    assert lse[0, 2:, 70:].isnan().all()
    assert out.isnan().sum() == 60 * 2 * dim
    assert lse.isnan().sum() == 60 * 2
    # In a value: its dim of the rows that see it, perhaps of others of the same sequence and KV head; lse stays.
    for value in (NAN, INF):
        bad = v.clone()
        bad[0, 70, 1, 3] = value
        out, lse = attend(op, q, k, bad, device=backend, causal=True)
        assert golden.same_bits(lse, clean_lse)
        assert not out[0, 70:, 2:, 3].isfinite().any()
        touched = out != clean
        assert not touched[1].any()
        assert not touched[0, :, :2].any()
        assert not touched[..., [i for i in range(dim) if i != 3]].any()
        if value != value:
            assert out[0, 70:, 2:, 3].isnan().all()


@pytest.mark.contract(7, 10)
@everywhere(op=[*ATTENTION, "exact pool"], low=["first", "last"])
def test_nan_in_a_value_survives_a_weight_that_underflows(op: str, low: str, backend: torch.device) -> None:
    """Eager attention multiplies it by its weight of 0; so does every merge, of splits and of exact keys."""
    length = 1200
    bad = 3 if low == "first" else length - 3
    dtype = plain_dtype(backend)
    q, k = torch.zeros(1, 1, 1, 64, dtype=dtype), torch.zeros(1, length, 1, 64, dtype=dtype)
    v = randn(1, length, 1, 64, dtype=dtype)
    q[..., 0] = 1
    far = slice(0, 512) if low == "first" else slice(1024, length)
    k[0, far, 0, 0] = -400
    if op == "exact pool":  # which holds the bad key and no other
        planes = [x.transpose(1, 2).contiguous() for y in (k, v) for x in flashq.tbq4_quantize(y)]
        v[0, bad, 0, 5] = NAN
        out, lse = call(
            "tbq4_attention", q, *planes, torch.tensor([length]), exact_k=k, exact_v=v,
            exact_block_table=torch.tensor([[0]]), scale=1.0, device=backend,
            **({"exact_first": 4} if low == "first" else {"exact_last": 4}),
        )  # fmt: skip
    else:
        v[0, bad, 0, 5] = NAN
        out, lse = attend(op, q, k, v, device=backend, scale=1.0)
    assert out[0, 0, 0, 5].isnan()
    assert lse.isfinite().all()


@pytest.mark.contract(7, 13)
@everywhere(op=["prefill", "exact pool"])
def test_whom_a_masked_nan_reaches_depends_on_neither_threads_nor_batch_mates(op: str, backend: torch.device) -> None:
    """Both change the blocks that rows are cut into. Rows that mask a NaN may get it, but always the same rows."""
    q, k, v = (randn(1, 192, 4, 64, dtype=plain_dtype(backend), seed=i) for i in range(3))
    clean, v = v, v.clone()
    v[0, 190, 0, 5] = NAN
    planes = [x.transpose(1, 2).contiguous() for y in (k, clean) for x in flashq.tbq4_quantize(y)]
    table = torch.zeros(1, 1, dtype=torch.int64)
    results = []
    for threads, batch in ((1, 1), (2, 1), (3, 1), (8, 1), (2, 3), (8, 3)):
        rows = [x.expand(batch, *x.shape[1:]) for x in (q, k, v)]
        with using_threads(threads):
            if op == "prefill":
                results.append(call("prefill", *rows, device=backend, causal=True))
            else:
                results.append(
                    call(
                        "tbq4_attention", rows[0], *(x.repeat(batch, 1, 1, 1) for x in planes),
                        torch.full((batch,), 192), exact_k=k, exact_v=v, exact_block_table=table.expand(batch, 1),
                        exact_last=80, device=backend,
                    )
                )  # fmt: skip
    assert results[0][0][0, 190:, 0, 5].isnan().all()
    for out, lse in results[1:]:
        assert golden.same_bits(out[-1], results[0][0][0])
        assert golden.same_bits(lse[-1], results[0][1][0])


@pytest.mark.contract(7)
@everywhere(op=["prefill", "decode"], sink=[None, 0.0])
def test_infinite_scores_give_eagers_answer_or_nan(op: str, sink: float | None, backend: torch.device) -> None:
    sinks = None if sink is None else torch.full((1,), sink)
    for bad in ([INF], [-INF], [INF, -INF], [-INF] * 5, [INF, INF]):
        dtype = plain_dtype(backend)
        k, v = (randn(1, 5, 1, 64, dtype=dtype, seed=i) for i in (0, 1))
        q = torch.ones(1, 1, 1, 64, dtype=dtype)
        k[0, : len(bad), 0, 0] = torch.tensor(bad)
        out, lse = attend(op, q, k, v, device=backend, sinks=sinks)
        truth, true_lse = reference.prefill(q, k, v, sinks)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        for got, expected in ((out, truth), (lse, true_lse)):
            fine = got.isnan() | torch.isclose(got.float(), expected, rtol=tolerance, atol=tolerance)
            assert fine.all(), (bad, got, expected)
            assert got[expected.isnan()].isnan().all(), "a NaN of eager was turned into a number"


@pytest.mark.contract(7)
def test_nan_in_a_tbq4_cache(backend: torch.device) -> None:
    cache = page_out([randn(90, 2, 64)], [randn(90, 2, 64, seed=1)], 16)
    planes = encode_pages(cache)
    q = randn(1, 3, 4, 64, dtype=plain_dtype(backend), seed=2)
    clean, clean_lse = call("tbq4_attention", q, *planes.args(), device=backend)
    page = int(planes.block_table[0, 88 // 16])
    for name in ("k_norms", "v_norms"):
        bad = planes._replace(**{name: getattr(planes, name).clone()})
        getattr(bad, name)[page, 1, 88 % 16] = NAN  # token 88: the last two queries see it
        out, lse = call("tbq4_attention", q, *bad.args(), device=backend)
        assert out[0, 1:, 2:].isnan().all()
        assert torch.equal(out[0, :, :2], clean[0, :, :2])
        if name == "k_norms":
            assert lse[0, 2:, 1:].isnan().all()
            assert torch.equal(out[0, 0], clean[0, 0])
            assert torch.equal(lse[..., 0], clean_lse[..., 0])
        else:
            assert torch.equal(lse, clean_lse)
    bad_query = q.clone()
    bad_query[0, 1, 3, 5] = NAN
    out, lse = call("tbq4_attention", bad_query, *planes.args(), device=backend)
    assert out[0, 1, 3].isnan().all()
    assert out.isnan().sum() == 64
    assert lse.isnan().sum() == 1


@pytest.mark.contract(8)
@everywhere(op=["decode", "tbq4_attention"], page_size=[1, 16, 48, 64])
def test_bytes_past_the_length_never_matter(op: str, page_size: int, backend: torch.device) -> None:
    """The same bits whether unseen memory holds zeros, NaN, Inf, or noise."""
    lengths, starts = (130, 1, 77), [40, 0, 5]
    keys, values = ([randn(n, 2, 64, dtype=torch.float16, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    poisoned = page_out(keys, values, page_size, kv_start=starts)
    hidden = poisoned.k.isnan().all(-1)
    q, start, results = randn(3, 2, 4, 64, dtype=torch.float16, seed=5), torch.tensor(starts), []
    for fill in (NAN, 0.0, INF, -INF, 60000.0):
        k, v = (torch.where(hidden[..., None], fill, x) for x in poisoned[:2])
        table = (
            torch.where(poisoned.block_table < 0, 2**31 - 1, poisoned.block_table)
            if fill == 0
            else poisoned.block_table
        )
        cache = Paged(k, v, table, poisoned.seqlens)
        if op == "decode":
            results.append(call("decode", q, k, v, cache.seqlens, table, device=backend, kv_start=start))
        else:
            planes = encode_pages(cache, poison=False)
            if math.isnan(fill):
                planes.k_codes[hidden.transpose(1, 2)] = 255
            results.append(call("tbq4_attention", q, *planes.args(), None, start, device=backend))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert results[0][0].isfinite().all()
