"""Which bits depend on what: index dtypes, merging, threads, batch mates, chunks (docs/contract.md, lines 9 to 13)."""

from __future__ import annotations

import itertools
import re
import threading

import pytest
import torch
from accuracy import using_threads
from cases import ATTENTION, DTYPES, attend, call, encode_pages, everywhere, page_out, plain_dtype, randn
from torch import Tensor

from flashq import _register, reference


@pytest.mark.contract(9)
@everywhere(op=["decode", "tbq4_attention", "prefill_varlen"])
def test_int32_and_int64_indices_in_any_strides_give_the_same_bits(op: str, backend: torch.device) -> None:
    lengths, dtype = (33, 5, 64), plain_dtype(backend)
    keys, values = ([randn(n, 1, 64, dtype=dtype, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
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
            q = randn(5, 2, 64, dtype=dtype, seed=3)
            if op == "decode":
                results.append(call(op, q, *cache[:2], seqlens, table, cu, start, device=backend))
            elif op == "tbq4_attention":
                results.append(call(op, q, *encode_pages(cache)[:4], seqlens, table, cu, start, device=backend))
            else:
                results.append(call(op, q, keys[0], values[0], cu, 2 * cu, device=backend, causal=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.contract(10)
@everywhere(op=["decode", "tbq4_attention"], dtype=DTYPES)
def test_partials_over_parts_of_the_keys_merge_to_the_whole(op: str, dtype: torch.dtype, backend: torch.device) -> None:
    length = 700
    cache = page_out([randn(length, 2, 64, dtype=dtype)], [randn(length, 2, 64, dtype=dtype, seed=1)], 16)
    planes = encode_pages(cache)
    q, sinks = randn(1, 3, 4, 64, dtype=dtype, seed=2), randn(4, seed=3)

    def run(end: int, start: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        more = (torch.tensor([end]), cache.block_table, None, torch.tensor([start]), sinks)
        options = {"causal": False, "out_dtype": torch.float32}
        if op == "decode":
            return call(op, q, *cache[:2], *more, device=backend, **options)
        return call(op, q, *planes[:4], *more, device=backend, **options)

    whole, whole_lse = run(length, 0, sinks)
    cuts = (0, 1, 1, 300, 699, 700)  # an empty part too
    parts = [run(b, a, sinks if a == 300 else None) for a, b in itertools.pairwise(cuts)]
    out, lse = call("merge_states", *(torch.stack(x) for x in zip(*parts, strict=True)), device=backend)
    if op == "decode":  # both are as near the truth as the contract says, so they are near each other
        more = (torch.tensor([length]), cache.block_table, None, torch.tensor([0]), sinks)
        truth, low = (reference.decode(q, *cache[:2], *more, causal=False, dtype=d)[0] for d in (torch.float64, dtype))
        bound, lse_bound = 2 * (2 * (low - truth).abs().max().item() + 1e-5), 2e-5 if dtype == torch.float32 else 2e-4
    else:
        bound = lse_bound = 2e-3
    torch.testing.assert_close(out, whole, rtol=0, atol=bound)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=lse_bound)


@pytest.mark.contract(10, 13)
@everywhere(op=["decode", "tbq4_attention"])
def test_a_rows_bits_with_kv_chunk_depend_on_its_sequence_alone(op: str, backend: torch.device) -> None:
    lengths, dtype = (1000, 3, 517, 0), plain_dtype(backend)
    keys, values = ([randn(n, 2, 64, dtype=dtype, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    q = randn(4, 2, 6, 64, dtype=dtype, seed=20)

    def run(members: tuple[int, ...], page_size: int, seed: int, **options: int) -> tuple[Tensor, Tensor]:
        cache = page_out([keys[b] for b in members], [values[b] for b in members], page_size, seed=seed)
        rows = q[list(members)]
        if op == "decode":
            where = (cache.seqlens, cache.block_table)
            return call(op, rows, *cache[:2], *where, device=backend, kv_chunk=256, **options)
        return call(op, rows, *encode_pages(cache).args(), device=backend, kv_chunk=256, **options)

    whole = run((0, 1, 2, 3), 16, 0)
    for members in ((0,), (2,), (1, 0), (3, 2, 1, 0)):
        for page_size, seed in ((16, 1), (64, 2), (1024, 3)):
            out, lse = run(members, page_size, seed, max_seqlen_q=7)
            assert torch.equal(out, whole[0][list(members)])
            assert torch.equal(lse, whole[1][list(members)])


@pytest.mark.contract(13)
@everywhere()
def test_prefill_rows_do_not_depend_on_batch_mates(backend: torch.device) -> None:
    lengths = (65, 1, 130, 33)
    q, k, v = (randn(sum(lengths), h, 64, dtype=torch.bfloat16, seed=h) for h in (6, 2, 3))
    v = v[:, :2]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out, lse = call("prefill_varlen", q, k, v, cu, cu, device=backend, causal=True)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        own = torch.tensor([0, n])
        for hints in ({}, {"max_seqlen_q": n, "max_seqlen_k": 9999}):
            alone = call("prefill_varlen", q[rows], k[rows], v[rows], own, own, device=backend, causal=True, **hints)
            assert torch.equal(alone[0], out[rows])
            assert torch.equal(alone[1], lse[:, rows])


@pytest.mark.contract(13)
@everywhere(keys=(65, 8192))  # of more, kernels split them
def test_rows_of_a_dense_prefill_do_not_depend_on_batch_mates(keys: int, backend: torch.device) -> None:
    shapes = ((65, 4), (keys, 2), (keys, 2))
    q, k, v = (randn(1, n, h, 64, dtype=torch.bfloat16, seed=i) for i, (n, h) in enumerate(shapes))
    alone = call("prefill", q, k, v, device=backend)
    among = call("prefill", *(torch.cat([x, *[x.flip(1)] * 7]) for x in (q, k, v)), device=backend)
    for one, many in zip(alone, among, strict=True):
        assert torch.equal(one[0], many[0])


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
@everywhere()
def test_chunked_prompts_give_the_same_rows(backend: torch.device) -> None:
    q, k, v = (randn(1, 150, h, 64, dtype=plain_dtype(backend), seed=h) for h in (4, 2, 3))
    v = v[:, :, :2]
    bound = 1e-5 if q.dtype == torch.float32 else 2e-3
    whole, whole_lse = call("prefill", q, k, v, device=backend, causal=True)
    for chunk in (1, 16, 64):
        for begin in range(0, 150, chunk):
            end = min(begin + chunk, 150)
            out, lse = call("prefill", q[:, begin:end], k[:, :end], v[:, :end], device=backend, causal=True)
            torch.testing.assert_close(out, whole[:, begin:end], rtol=0, atol=bound)
            torch.testing.assert_close(lse, whole_lse[..., begin:end], rtol=0, atol=1e-5)
