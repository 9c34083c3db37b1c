"""What docs/contract.md promises beyond numbers: exact cases, NaN and Inf, poison, determinism, sizes, gradients.

Every numbered line of the contract has a test somewhere under tests/, marked contract(line); the last test here holds
that.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path

import golden
import pytest
import torch
from accuracy import check_16bit, check_tbq4, using_threads
from cases import DTYPES, Paged, encode_pages, lay_out, page_out, randn
from torch import Tensor
from torch.autograd import forward_ad

import flashq
from flashq import _register, reference

NAN, INF = float("nan"), float("inf")
ATTENTION = ("prefill", "decode", "tbq4_attention")


def attend(op: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """One of the three attention ops on plain q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D)."""
    if op == "prefill":
        return flashq.prefill(q, k, v, **options)
    if op == "decode":
        return flashq.decode(q, k, v, torch.full((len(k),), k.shape[1]), **options)
    planes = [x.transpose(1, 2).contiguous() for y in (k, v) for x in flashq.tbq4_quantize(y)]
    return flashq.tbq4_attention(q, *planes, torch.full((len(k),), k.shape[1]), **options)


@pytest.mark.contract(1)
@pytest.mark.parametrize("op", ATTENTION)
def test_default_scale_and_softcap_zero(op: str, isa: str) -> None:
    q, k, v = randn(1, 2, 2, 64), randn(1, 9, 1, 64, seed=1), randn(1, 9, 1, 64, seed=2)
    plain = attend(op, q, k, v)
    for options in ({"scale": 0.125}, {"softcap": 0.0}, {"scale": None}):
        assert all(map(torch.equal, attend(op, q, k, v, **options), plain))


def seen_keys(op: str, q_len: int, kv_len: int, **options: int | bool) -> list[set[int]]:
    """Which keys each query sees: equal scores, and value j in dimension j."""
    dim = 64
    assert kv_len <= dim
    v = torch.eye(kv_len, dim)[None, :, None]
    if op == "tbq4_attention":  # 4 bits cannot hold a unit vector, so an exact pool of one page does
        codes, norms = torch.zeros(1, 1, kv_len, 32, dtype=torch.uint8), torch.zeros(1, 1, kv_len, 1).half()
        out, _ = flashq.tbq4_attention(
            torch.zeros(1, q_len, 1, dim), codes, norms, codes, norms, torch.tensor([kv_len]),
            exact_k=torch.zeros_like(v), exact_v=v, exact_block_table=torch.tensor([[0]]),
            exact_first=kv_len, **options,
        )  # fmt: skip
    else:
        out, _ = attend(op, torch.zeros(1, q_len, 1, dim), torch.zeros_like(v), v, **options)
    return [set(row.nonzero()[:, 0].tolist()) for row in out[0, :, 0]]


@pytest.mark.contract(5)
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("lengths", [(1, 1), (3, 7), (7, 3), (8, 40), (20, 20), (5, 64), (33, 1)])
def test_who_sees_whom(op: str, lengths: tuple[int, int], isa: str) -> None:
    q_len, kv_len = lengths
    off = kv_len - q_len
    rights = (-1, 0, 2) if op == "prefill" else (-1,)
    for causal in (False, True):
        for left in (-1, 0, 1, 5, 40):
            for right in rights:
                options = {"causal": causal, "window_left": left}
                if op == "prefill":
                    options["window_right"] = right
                seen = seen_keys(op, q_len, kv_len, **options)
                for i in range(q_len):
                    expected = {
                        j
                        for j in range(kv_len)
                        if (not causal or j <= i + off)
                        and (left == -1 or j >= i + off - left)
                        and (right == -1 or j <= i + off + right)
                    }
                    assert seen[i] == expected, (i, options)


@pytest.mark.contract(5)
@pytest.mark.parametrize("op", ATTENTION)
def test_windows_beyond_any_length(op: str, isa: str) -> None:
    q, k, v = randn(1, 3, 2, 64), randn(1, 9, 1, 64, seed=1), randn(1, 9, 1, 64, seed=2)
    wide = 2**63 - 1
    options = {"window_left": wide} | ({"window_right": wide} if op == "prefill" else {})
    for causal in (False, True):
        assert all(map(torch.equal, attend(op, q, k, v, causal=causal, **options), attend(op, q, k, v, causal=causal)))


@pytest.mark.contract(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_one_visible_key_gives_its_value_bit_for_bit(op: str, dtype: torch.dtype, isa: str) -> None:
    for length in (1, 2, 65, 130):
        for dim in (8, 64, 80, 256):
            q, k, v = (randn(2, length, h, dim, dtype=dtype, seed=h) for h in (6, 2, 2))
            k *= 3
            out, lse = attend(op, q, k, v, causal=True, window_left=0, scale=-1.7)
            assert torch.equal(out, v.repeat_interleave(3, dim=2))
            score = -1.7 * (q.double() * k.repeat_interleave(3, dim=2).double()).sum(-1).transpose(1, 2)
            torch.testing.assert_close(lse.double(), score, rtol=1e-6, atol=1e-4)


@pytest.mark.contract(6)
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("sink", [None, 1.5, -INF])
def test_rows_without_a_visible_key(op: str, sink: float | None, isa: str) -> None:
    for dtype in DTYPES:
        q = torch.full((1, 70, 4, 64), NAN, dtype=dtype)
        k, v = (randn(1, 3, 2, 64, dtype=dtype, seed=i) for i in (1, 2))
        sinks = None if sink is None else torch.full((4,), sink)
        out, lse = attend(op, q, k, v, sinks=sinks, causal=True)
        assert torch.equal(out[:, :-3], torch.zeros_like(out[:, :-3]))
        assert (lse[..., :-3] == (-INF if sink is None else sink)).all()
        assert out[:, -3:].isnan().all()
        assert lse[..., -3:].isnan().all()


@pytest.mark.contract(6)
@pytest.mark.parametrize("op", ATTENTION)
def test_lse_is_the_natural_logarithm_of_the_sum(op: str, isa: str) -> None:
    for n in (1, 2, 63, 64, 65, 300):
        _, lse = attend(op, torch.zeros(1, 2, 2, 64), torch.zeros(1, n, 1, 64), torch.zeros(1, n, 1, 64))
        expected = torch.tensor([math.log(n)] if op == "prefill" else [math.log(max(n - 1, 0) or 1), math.log(n)])
        if op != "prefill" and n == 1:
            expected[0] = -INF  # the first of two queries stands before the only key
        torch.testing.assert_close(lse, expected.expand(1, 2, 2), rtol=0, atol=2e-6)
        sinks = torch.tensor([0.5, -INF])
        _, with_sink = attend(
            op, torch.zeros(1, 1, 2, 64), torch.zeros(1, n, 1, 64), torch.zeros(1, n, 1, 64), sinks=sinks
        )
        expected = torch.tensor([math.log(n + math.exp(0.5)), math.log(n)])[None, :, None]
        torch.testing.assert_close(with_sink, expected, rtol=0, atol=2e-6)


@pytest.mark.contract(6)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_finite_score_wins_however_low(op: str, isa: str) -> None:
    """Scores around -1e30 in tiles after masked ones; a finite sentinel for "masked" would win over them."""
    q, k = torch.full((1, 1, 1, 8), 1e10), torch.zeros(1, 200, 1, 8)
    v = randn(1, 200, 1, 8)
    k[0, :, 0, 0] = -1e20
    out, lse = attend(op, q, k, v, scale=1.0, causal=True, window_left=3)
    torch.testing.assert_close(out[0, 0, 0], v[0, -4:, 0].mean(0))
    torch.testing.assert_close(lse, torch.full((1, 1, 1), -1e30), rtol=1e-6, atol=0)


@pytest.mark.contract(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_nan_goes_where_it_must_and_nowhere_else(op: str, dtype: torch.dtype, isa: str) -> None:
    batch, length, dim = 2, 130, 64
    q, k, v = (randn(batch, length, h, dim, dtype=dtype, seed=h) for h in (4, 2, 2))
    clean, clean_lse = attend(op, q, k, v, causal=True)
    # In a query: that row.
    bad = q.clone()
    bad[0, 70, 1, 3] = NAN
    out, lse = attend(op, bad, k, v, causal=True)
    assert out[0, 70, 1].isnan().all()
    assert lse[0, 1, 70].isnan()
    assert out.isnan().sum() == dim
    assert lse.isnan().sum() == 1
    # In a key: every row that sees it.
    bad = k.clone()
    bad[0, 70, 1, 3] = NAN
    out, lse = attend(op, q, bad, v, causal=True)
    assert out[0, 70:, 2:].isnan().all()
    assert lse[0, 2:, 70:].isnan().all()
    assert out.isnan().sum() == 60 * 2 * dim
    assert lse.isnan().sum() == 60 * 2
    # In a value: its dim of the rows that see it, perhaps of others of the same sequence and KV head; lse stays.
    for value in (NAN, INF):
        bad = v.clone()
        bad[0, 70, 1, 3] = value
        out, lse = attend(op, q, k, bad, causal=True)
        assert golden.same_bits(lse, clean_lse)
        assert not out[0, 70:, 2:, 3].isfinite().any()
        touched = out != clean
        assert not touched[1].any()
        assert not touched[0, :, :2].any()
        assert not touched[..., [i for i in range(dim) if i != 3]].any()
        if value != value:
            assert out[0, 70:, 2:, 3].isnan().all()


@pytest.mark.contract(7, 10)
@pytest.mark.parametrize("low", ["first", "last"])
@pytest.mark.parametrize("op", [*ATTENTION, "exact pool"])
def test_nan_in_a_value_survives_a_weight_that_underflows(op: str, low: str, isa: str) -> None:
    """Eager attention multiplies it by its weight of 0; so does every merge, of splits and of exact keys."""
    length = 1200
    bad = 3 if low == "first" else length - 3
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, length, 1, 64), randn(1, length, 1, 64)
    q[..., 0] = 1
    far = slice(0, 512) if low == "first" else slice(1024, length)
    k[0, far, 0, 0] = -400
    if op == "exact pool":  # which holds the bad key and no other
        planes = [x.transpose(1, 2).contiguous() for y in (k, v) for x in flashq.tbq4_quantize(y)]
        v[0, bad, 0, 5] = NAN
        out, lse = flashq.tbq4_attention(
            q, *planes, torch.tensor([length]), exact_k=k, exact_v=v, exact_block_table=torch.tensor([[0]]), scale=1.0,
            **({"exact_first": 4} if low == "first" else {"exact_last": 4}),
        )  # fmt: skip
    else:
        v[0, bad, 0, 5] = NAN
        out, lse = attend(op, q, k, v, scale=1.0)
    assert out[0, 0, 0, 5].isnan()
    assert lse.isfinite().all()


@pytest.mark.contract(7, 13)
@pytest.mark.parametrize("op", ["prefill", "exact pool"])
def test_whom_a_masked_nan_reaches_depends_on_neither_threads_nor_batch_mates(op: str, isa: str) -> None:
    """Both change the blocks that rows are cut into. Rows that mask a NaN may get it, but always the same rows."""
    q, k, v = (randn(1, 192, 4, 64, seed=i) for i in range(3))
    clean, v = v, v.clone()
    v[0, 190, 0, 5] = NAN
    planes = [x.transpose(1, 2).contiguous() for y in (k, clean) for x in flashq.tbq4_quantize(y)]
    table = torch.zeros(1, 1, dtype=torch.int64)
    results = []
    for threads, batch in ((1, 1), (2, 1), (3, 1), (8, 1), (2, 3), (8, 3)):
        rows = [x.expand(batch, *x.shape[1:]) for x in (q, k, v)]
        with using_threads(threads):
            if op == "prefill":
                results.append(flashq.prefill(*rows, causal=True))
            else:
                results.append(
                    flashq.tbq4_attention(
                        rows[0], *(x.repeat(batch, 1, 1, 1) for x in planes), torch.full((batch,), 192), exact_k=k,
                        exact_v=v, exact_block_table=table.expand(batch, 1), exact_last=80,
                    )
                )  # fmt: skip
    assert results[0][0][0, 190:, 0, 5].isnan().all()
    for out, lse in results[1:]:
        assert golden.same_bits(out[-1], results[0][0][0])
        assert golden.same_bits(lse[-1], results[0][1][0])


@pytest.mark.contract(7)
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("sink", [None, 0.0])
def test_infinite_scores_give_eagers_answer_or_nan(op: str, sink: float | None, isa: str) -> None:
    sinks = None if sink is None else torch.full((1,), sink)
    for bad in ([INF], [-INF], [INF, -INF], [-INF] * 5, [INF, INF]):
        q, k, v = torch.ones(1, 1, 1, 64), randn(1, 5, 1, 64), randn(1, 5, 1, 64, seed=1)
        k[0, : len(bad), 0, 0] = torch.tensor(bad)
        out, lse = attend(op, q, k, v, sinks=sinks)
        truth, true_lse = reference.prefill(q, k, v, sinks)
        for got, expected in ((out, truth), (lse, true_lse)):
            fine = got.isnan() | torch.isclose(got, expected, rtol=1e-5, atol=1e-5)
            assert fine.all(), (bad, got, expected)
            assert got[expected.isnan()].isnan().all(), "a NaN of eager was turned into a number"


@pytest.mark.contract(7)
def test_nan_in_a_tbq4_cache(isa: str) -> None:
    cache = page_out([randn(90, 2, 64)], [randn(90, 2, 64, seed=1)], 16)
    planes = encode_pages(cache)
    q = randn(1, 3, 4, 64, seed=2)
    clean, clean_lse = flashq.tbq4_attention(q, *planes.args())
    page = int(planes.block_table[0, 88 // 16])
    for name in ("k_norms", "v_norms"):
        bad = planes._replace(**{name: getattr(planes, name).clone()})
        getattr(bad, name)[page, 1, 88 % 16] = NAN  # token 88: the last two queries see it
        out, lse = flashq.tbq4_attention(q, *bad.args())
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
    out, lse = flashq.tbq4_attention(bad_query, *planes.args())
    assert out[0, 1, 3].isnan().all()
    assert out.isnan().sum() == 64
    assert lse.isnan().sum() == 1


@pytest.mark.contract(8)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
def test_bytes_past_the_length_never_matter(op: str, page_size: int, isa: str) -> None:
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
            results.append(flashq.decode(q, k, v, cache.seqlens, table, kv_start=start))
        else:
            planes = encode_pages(cache, poison=False)
            if math.isnan(fill):
                planes.k_codes[hidden.transpose(1, 2)] = 255
            results.append(flashq.tbq4_attention(q, *planes.args(), None, start))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert results[0][0].isfinite().all()


@pytest.mark.contract(9)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention", "prefill_varlen"])
def test_int32_and_int64_indices_in_any_strides_give_the_same_bits(op: str, isa: str) -> None:
    lengths = (33, 5, 64)
    keys, values = ([randn(n, 1, 64, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    results = []
    for index_dtype in (torch.int32, torch.int64):
        cache = page_out(keys, values, 16, index_dtype=index_dtype)
        cu = torch.tensor([0, 2, 2, 5], dtype=index_dtype)
        start = torch.tensor([1, 0, 3], dtype=index_dtype)
        for spread in (False, True):
            table, seqlens = cache.block_table, cache.seqlens
            if spread:
                table = table.t().contiguous().t()
                cu, start, seqlens = (x.repeat_interleave(2)[::2] for x in (cu, start, seqlens))
            q = randn(5, 2, 64, seed=3)
            if op == "decode":
                results.append(flashq.decode(q, *cache[:2], seqlens, table, cu, start))
            elif op == "tbq4_attention":
                results.append(flashq.tbq4_attention(q, *encode_pages(cache)[:4], seqlens, table, cu, start))
            else:
                results.append(flashq.prefill_varlen(q, keys[0], values[0], cu, 2 * cu, causal=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.contract(10)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_partials_over_parts_of_the_keys_merge_to_the_whole(op: str, dtype: torch.dtype, isa: str) -> None:
    length = 700
    cache = page_out([randn(length, 2, 64, dtype=dtype)], [randn(length, 2, 64, dtype=dtype, seed=1)], 16)
    planes = encode_pages(cache)
    q, sinks = randn(1, 3, 4, 64, dtype=dtype, seed=2), randn(4, seed=3)

    def run(end: int, start: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        more = (torch.tensor([end]), cache.block_table, None, torch.tensor([start]), sinks)
        options = {"causal": False, "out_dtype": torch.float32}
        if op == "decode":
            return flashq.decode(q, *cache[:2], *more, **options)
        return flashq.tbq4_attention(q, *planes[:4], *more, **options)

    whole, whole_lse = run(length, 0, sinks)
    cuts = (0, 1, 1, 300, 699, 700)  # an empty part too
    parts = [run(b, a, sinks if a == 300 else None) for a, b in itertools.pairwise(cuts)]
    out, lse = flashq.merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    if op == "decode":  # both are as near the truth as the contract says, so they are near each other
        more = (torch.tensor([length]), cache.block_table, None, torch.tensor([0]), sinks)
        truth, low = (reference.decode(q, *cache[:2], *more, causal=False, dtype=d)[0] for d in (torch.float64, dtype))
        bound, lse_bound = 2 * (2 * (low - truth).abs().max().item() + 1e-5), 2e-5 if dtype == torch.float32 else 2e-4
    else:
        bound = lse_bound = 2e-3
    torch.testing.assert_close(out, whole, rtol=0, atol=bound)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=lse_bound)


@pytest.mark.contract(10, 13)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention"])
def test_a_rows_bits_with_kv_chunk_depend_on_its_sequence_alone(op: str, isa: str) -> None:
    lengths = (1000, 3, 517, 0)
    keys, values = ([randn(n, 2, 64, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    q = randn(4, 2, 6, 64, seed=20)

    def run(members: tuple[int, ...], page_size: int, seed: int, **options: int) -> tuple[Tensor, Tensor]:
        cache = page_out([keys[b] for b in members], [values[b] for b in members], page_size, seed=seed)
        rows = q[list(members)]
        if op == "decode":
            return flashq.decode(rows, *cache[:2], cache.seqlens, cache.block_table, kv_chunk=256, **options)
        return flashq.tbq4_attention(rows, *encode_pages(cache).args(), kv_chunk=256, **options)

    whole = run((0, 1, 2, 3), 16, 0)
    for members in ((0,), (2,), (1, 0), (3, 2, 1, 0)):
        for page_size, seed in ((16, 1), (64, 2), (1024, 3)):
            out, lse = run(members, page_size, seed, max_seqlen_q=7)
            assert torch.equal(out, whole[0][list(members)])
            assert torch.equal(lse, whole[1][list(members)])


@pytest.mark.contract(13)
def test_prefill_rows_do_not_depend_on_batch_mates(isa: str) -> None:
    lengths = (65, 1, 130, 33)
    q, k, v = (randn(sum(lengths), h, 64, dtype=torch.bfloat16, seed=h) for h in (6, 2, 3))
    v = v[:, :2]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out, lse = flashq.prefill_varlen(q, k, v, cu, cu, causal=True)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        for alone, alone_lse in (
            flashq.prefill_varlen(q[rows], k[rows], v[rows], torch.tensor([0, n]), torch.tensor([0, n]), causal=True),
            flashq.prefill_varlen(q[rows], k[rows], v[rows], torch.tensor([0, n]), torch.tensor([0, n]), causal=True,
                                  max_seqlen_q=n, max_seqlen_k=9999),
        ):  # fmt: skip
            assert torch.equal(alone, out[rows])
            assert torch.equal(alone_lse, lse[:, rows])
    batch = [x[:65].unsqueeze(0) for x in (q, k, v)]
    pair = [torch.cat([x, x.flip(1)]) for x in batch]
    assert torch.equal(flashq.prefill(*batch)[0][0], flashq.prefill(*pair)[0][0])


@pytest.mark.contract(13)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ATTENTION)
def test_bits_do_not_depend_on_the_thread_count(op: str, dtype: torch.dtype, isa: str) -> None:
    for batch, q_len, length in ((1, 1, 2500), (3, 4, 300), (2, 130, 130)):
        q, k, v = (randn(batch, n, h, 64, dtype=dtype, seed=h) for n, h in ((q_len, 8), (length, 2), (length, 1)))
        v = v.expand_as(k)
        results = []
        for threads in (1, 2, 3, 7, 2):
            with using_threads(threads):
                results.append(attend(op, q, k, v, causal=True))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


@pytest.mark.contract(12)
@pytest.mark.parametrize("op", ATTENTION)
def test_calls_from_several_threads_do_not_disturb_each_other(op: str) -> None:
    """Counters and scratch belong to a call, so concurrent calls give what they give alone."""
    jobs = [tuple(randn(1, n, h, 64, seed=n + h) for n, h in ((3, 4), (n, 1), (n, 1))) for n in (700, 64, 300, 1500)]
    alone = [attend(op, *job) for job in jobs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(15):
            if not all(map(torch.equal, attend(op, *jobs[i]), alone[i])):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.contract(12)
def test_no_op_takes_a_workspace_or_a_plan() -> None:
    for op in _register.OPS:
        for argument in getattr(torch.ops.flashq, op).default._schema.arguments:
            assert not re.search("work|scratch|buffer|plan|metadata|splits", argument.name)


@pytest.mark.contract(13)
def test_chunked_prompts_give_the_same_rows(isa: str) -> None:
    q, k, v = (randn(1, 150, h, 64, seed=h) for h in (4, 2, 3))
    v = v[:, :, :2]
    whole, whole_lse = flashq.prefill(q, k, v, causal=True)
    for chunk in (1, 16, 64):
        for begin in range(0, 150, chunk):
            end = min(begin + chunk, 150)
            out, lse = flashq.prefill(q[:, begin:end], k[:, :end], v[:, :end], causal=True)
            torch.testing.assert_close(out, whole[:, begin:end], rtol=0, atol=1e-5)
            torch.testing.assert_close(lse, whole_lse[..., begin:end], rtol=0, atol=1e-5)


@pytest.mark.contract(14)
@pytest.mark.parametrize("sizes", [(0, 3, 9), (2, 0, 9), (2, 3, 0), (0, 0, 0), (1, 0, 0)])
def test_empty_sizes(sizes: tuple[int, int, int], isa: str) -> None:
    batch, q_len, kv_len = sizes
    q, k = randn(batch, q_len, 4, 64), randn(batch, kv_len, 2, 64)
    for op in ATTENTION:
        out, lse = attend(op, q, k, k)
        assert out.shape == q.shape
        assert lse.shape == (batch, 4, q_len)
        if not kv_len:
            assert not out.any()
            assert (lse == -INF).all()
        attend(op, q, k, k, sinks=torch.zeros(4))


@pytest.mark.contract(14)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention"])
def test_no_pages_and_no_table_entries(op: str, isa: str) -> None:
    cache = Paged(torch.empty(0, 16, 2, 64), torch.empty(0, 16, 2, 64), torch.empty(3, 0).int(), torch.zeros(3).int())
    check: Callable = check_tbq4 if op == "tbq4_attention" else lambda *args: check_16bit("decode", *args)
    args = encode_pages(cache).args() if op == "tbq4_attention" else (*cache[:2], cache.seqlens, cache.block_table)
    out, lse = check(randn(3, 2, 4, 64), *args)
    assert not out.any()
    assert (lse == -INF).all()
    cu = torch.zeros(1, dtype=torch.int64)
    out, lse = check(randn(5, 4, 64), *args[:-2], cache.seqlens[:0], cache.block_table[:0], cu)
    assert not out.any()
    assert lse.shape == (4, 5)


@pytest.mark.contract(11)
def test_offsets_beyond_32_bits() -> None:
    """Pages, rows and heads further than 2^31 and 2^32 elements from the base; only touched memory becomes real."""
    generator = torch.Generator().manual_seed(0)
    pages = (2**32 + 2**20) // (16 * 2 * 64)
    room = torch.empty(2, pages, 16, 2, 64, dtype=torch.float16)  # 17 GB of addresses, a few MB of memory
    used = torch.tensor([pages - 1, 3, pages // 2 + 1, pages - 2])
    room[:, used] = torch.randn(2, 4, 16, 2, 64, generator=generator).half()
    q, table, seqlens = randn(1, 2, 4, 64, dtype=torch.float16), used[None], torch.tensor([61])
    out, lse = flashq.decode(q, room[0], room[1], seqlens, table)
    truth = flashq.decode(q, *room[:, used].contiguous(), seqlens, torch.arange(4)[None])
    assert torch.equal(out, truth[0])
    assert torch.equal(lse, truth[1])
    k, v = randn(2, 2, 64, dtype=torch.float16, seed=1), randn(2, 2, 64, dtype=torch.float16, seed=2)
    flashq.kv_append_(k, v, room[0], room[1], torch.tensor([pages * 16 - 1, 5]))
    assert torch.equal(room[0, -1, -1], k[0])
    assert torch.equal(room[1, 0, 5], v[1])
    # Rows of a batch 2^31 and more elements apart.
    flat = room.view(-1)
    far = flat.as_strided((2, 9, 2, 64), (2**32 + 8 * 64, 2 * 64, 64, 1))
    far.copy_(torch.randn(far.shape, generator=generator))
    out, lse = flashq.prefill(far, far, far, causal=True)
    truth = flashq.prefill(*[far.contiguous()] * 3, causal=True)
    assert torch.equal(out, truth[0])
    assert torch.equal(lse, truth[1])


@pytest.mark.contract(11, 17)
def test_tbq4_offsets_beyond_32_bits() -> None:
    pages = (2**32 + 2**20) // (16 * 2 * 32)
    codes, norms = torch.empty(pages, 2, 16, 32, dtype=torch.uint8), torch.empty(pages, 2, 16, 1, dtype=torch.float16)
    used = torch.tensor([pages - 1, 3, pages // 2 + 1])
    slots = (used[:, None] * 16 + torch.arange(16)).flatten()
    k = randn(48, 2, 64)
    flashq.tbq4_append_(k, k, codes, norms, codes, norms, slots)
    near = [codes[used], norms[used]]
    expected = [torch.zeros_like(near[0]), torch.zeros_like(near[1])]
    flashq.tbq4_append_(k, k, *expected, *expected, torch.arange(48))
    assert torch.equal(near[0], expected[0])
    assert torch.equal(near[1], expected[1])
    q, seqlens = randn(1, 2, 4, 64), torch.tensor([45])
    out, _ = flashq.tbq4_attention(q, codes, norms, codes, norms, seqlens, used[None])
    truth, _ = flashq.tbq4_attention(q, *expected, *expected, seqlens, torch.arange(3)[None])
    assert torch.equal(out, truth)


@pytest.mark.contract(2)
@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(layout: str, isa: str) -> None:
    for dtype in DTYPES:
        q, k, v = (randn(2, 40, h, 80, dtype=dtype, seed=h) for h in (4, 2, 3))
        v = v[:, :, :2].contiguous()
        for op in ("prefill", "decode"):
            plain = attend(op, q, k, v)
            for which in ((0,), (1,), (2,), (0, 1, 2)):  # each has strides of its own
                strided = attend(op, *(lay_out(x, layout) if i in which else x for i, x in enumerate((q, k, v))))
                assert all(map(torch.equal, plain, strided))


@pytest.mark.contract(2)
@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_an_exact_pool_of_any_strides_gives_the_bits_of_a_contiguous_one(layout: str, isa: str) -> None:
    q, k, v = (randn(1, n, h, 64, seed=h) for n, h in ((2, 4), (40, 2), (40, 3)))
    v = v[:, :, :2].contiguous()

    def run(exact_k: Tensor, exact_v: Tensor) -> tuple[Tensor, Tensor]:
        pool = {"exact_k": exact_k, "exact_v": exact_v, "exact_block_table": torch.tensor([[0]])}
        return attend("tbq4_attention", q, k, v, exact_first=4, exact_last=20, **pool)

    # attend() encodes k and v; the pool holds them as they are.
    plain = run(k, v)
    for strided in ((lay_out(k, layout), v), (k, lay_out(v, layout))):
        assert all(map(torch.equal, plain, run(*strided)))


def gradient_calls() -> dict[str, tuple[Tensor, ...]]:
    q, k = torch.randn(1, 3, 4, 64), torch.randn(1, 9, 2, 64)
    planes = [x.transpose(1, 2).contiguous() for x in reference.tbq4_quantize(k)]
    lengths, slots = torch.tensor([9]), torch.arange(9)
    return {
        "prefill": (q, k, k),
        "prefill_varlen": (q[0], k[0], k[0], torch.tensor([0, 3]), torch.tensor([0, 9])),
        "decode": (q, k, k, lengths),
        "tbq4_attention": (q, *planes, *planes, lengths),
        "kv_append_": (k[0], k[0], torch.zeros_like(k), torch.zeros_like(k), slots),
        "tbq4_append_": (k[0], k[0], *planes, *planes, slots),
        "tbq4_quantize": (k,),
        "tbq4_rotate": (k,),
        "tbq4_dequantize": tuple(planes),
        "merge_states": (torch.randn(2, 1, 3, 4, 64), torch.randn(2, 1, 4, 3)),
    }


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", _register.OPS)
def test_inputs_that_require_grad_are_refused(op: str) -> None:
    args = gradient_calls()[op]
    names = [a.name for a in getattr(torch.ops.flashq, op).default._schema.arguments]
    for i, tensor in enumerate(args):
        if not tensor.is_floating_point():
            continue
        learning = [
            x.detach().clone().requires_grad_(i == j) if x.is_floating_point() else x for j, x in enumerate(args)
        ]
        for call in (getattr(flashq, op), getattr(torch.ops.flashq, op)):
            with pytest.raises(
                RuntimeError, match=f"flashq::{op}: {names[i]}: expected .*, got a tensor that requires grad"
            ):
                call(*learning)
        with torch.no_grad():
            getattr(flashq, op)(*learning)
        with torch.inference_mode():
            getattr(flashq, op)(*learning)
    results = getattr(flashq, op)(*args)
    for result in results if isinstance(results, tuple) else [results]:
        assert result is None or not result.requires_grad


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", _register.OPS)
def test_inputs_with_a_tangent_are_refused(op: str) -> None:
    args = gradient_calls()[op]
    names = [a.name for a in getattr(torch.ops.flashq, op).default._schema.arguments]
    for i, tensor in enumerate(args):
        if not tensor.is_floating_point():
            continue
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate(args)]
            with pytest.raises(RuntimeError, match=f"flashq::{op}: {names[i]}: expected a tensor without a tangent"):
                getattr(flashq, op)(*dual)
            getattr(flashq, op)(*args)


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", ["kv_append_", "tbq4_append_"])
def test_backward_refuses_what_an_append_has_overwritten(op: str) -> None:
    """Of saved tensors torch knows the version: a gradient from the new bytes would be wrong without a word."""
    args = gradient_calls()[op]
    cache = args[3]  # v_cache or k_norms
    weight = torch.ones(1, requires_grad=True)
    product = (cache * weight).sum()
    with torch.no_grad():
        getattr(flashq, op)(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    versions = [x._version for x in args]
    getattr(flashq, op)(*args)
    arguments = getattr(torch.ops.flashq, op).default._schema.arguments
    written = [a.alias_info is not None for a in arguments[: len(args)]]
    assert [x._version > before for x, before in zip(args, versions, strict=True)] == written
    with torch.inference_mode():
        inferred = [x.clone() for x in args]
    getattr(flashq, op)(*inferred)  # tensors without a version


def test_every_line_of_the_contract_has_a_test() -> None:
    marked: set[int] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for lines in re.findall(r"mark\.contract\(([\d, ]+)\)", path.read_text()):
            marked |= {int(line) for line in lines.split(",")}
    assert marked == set(range(1, 18))
