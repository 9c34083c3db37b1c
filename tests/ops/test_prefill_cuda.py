"""prefill on CUDA where it differs from the CPU: many tiles, index tensors that only the device knows, graphs."""

from __future__ import annotations

import itertools
import math

import golden
import pytest
import torch
from accuracy import check_16bit, compare_16bit
from cases import INF, NAN, call, case_id, make_sinks, page_out, pairwise, randn
from smaller_gpus import pass_on_sm80
from torch import Tensor

import flashq

pytestmark = pytest.mark.cuda

CASES = pairwise(
    dtype=(torch.bfloat16, torch.float16),
    head_dim=(64, 128, 256, 80, 96, 192),
    heads=((2, 2), (6, 1), (8, 4), (5, 1)),
    lengths=((1000, 1111), (700, 300), (129, 2047), (513, 513), (64, 4100)),
    mask=((False, -1, -1), (True, -1, -1), (True, 200, -1), (False, 100, 33)),
    softcap=(0.0, 20.0),
    sinks=("none", "some"),
    growth=("normal", "times 8", "negative", "rising"),
    aligned=(True, False),
)


@pytest.mark.contract(1, 2, 4, 5, 6)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_many_tiles(case: dict) -> None:
    (sq, sk), (heads, kv_heads), dim, dtype = case["lengths"], case["heads"], case["head_dim"], case["dtype"]
    q, k, v = (randn(1, n, h, dim, seed=i) for i, (n, h) in enumerate(((sq, heads), (sk, kv_heads), (sk, kv_heads))))
    if case["growth"] == "times 8":
        q *= 8
    elif case["growth"] == "negative":  # every score
        q, k = q.abs(), -k.abs()
    elif case["growth"] == "rising":  # with the key: the maximum grows again and again
        q, k = q.abs(), k.abs() * torch.linspace(0, 4, sk)[:, None, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if not case["aligned"]:
        q, k, v = (torch.cat([x.new_full((*x.shape[:-1], 1), NAN), x], dim=-1)[..., 1:] for x in (q, k, v))
    causal, left, right = case["mask"]
    options = {"causal": causal, "window_left": left, "window_right": right, "softcap": case["softcap"]}
    check_16bit("prefill", q, k, v, make_sinks(case["sinks"], heads), device="cuda", big=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("late", [0, 1300])
def test_scores_far_above_all_before(dtype: torch.dtype, dim: int, softcap: float, late: int) -> None:
    """Some rows meet a score beyond what fp16 could hold relative to the ones before; keys are read from the last."""
    q, k, v = (randn(1, n, 2, dim, seed=i) for i, n in enumerate((300, 1400, 1400)))
    q[:, ::37] *= 30
    k[:, late : late + 10] *= 8
    check_16bit("prefill", *(x.to(dtype) for x in (q, k, v)), device="cuda", big=True, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_scores_of_one_row_leave_its_neighbours_alone(dtype: torch.dtype, dim: int) -> None:
    q, k, v = (randn(1, n, 1, dim, dtype=dtype, seed=i).cuda() for i, n in enumerate((256, 2048, 2048)))
    large = q.clone()
    large[:, [5, 77]] *= 60
    others = [row for row in range(256) if row not in (5, 77)]
    for before, after in zip(flashq.prefill(q, k, v), flashq.prefill(large, k, v), strict=True):
        rows = 1 if before.ndim == 4 else 2
        wanted = torch.tensor(others, device="cuda")
        assert torch.equal(before.index_select(rows, wanted), after.index_select(rows, wanted))


@pytest.mark.parametrize("page_size", [16, 64, 7, 48, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [-1, 150])
def test_many_rows_over_pages(page_size: int, dim: int, window: int) -> None:
    lengths = (1500, 130, 700)
    keys, values = ([randn(n, 2, dim, dtype=torch.bfloat16, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    starts = [37, 0, 64]
    cache = page_out(keys, values, page_size, kv_start=starts)
    q = randn(3, 130, 6, dim, dtype=torch.bfloat16)
    more = (cache.seqlens, cache.block_table, None, torch.tensor(starts))
    check_16bit("decode", q, *cache[:2], *more, device="cuda", big=True, window_left=window)


@pytest.mark.contract(1)
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("queries", [1, 40, 300])
@pytest.mark.parametrize(
    ("scale", "softcap", "magnitude"),
    [
        (3e38, 0.0, 1e-20),
        (1e30, 1e-9, 1e-16),
        (1e-30, 3e38, 1e15),
        (3e38, 3e38, 1e-20),
        (2.0, 1e-37, 1.0),
        (1.0, 1e-40, 0.0),
    ],
)
def test_any_finite_scale_and_softcap(op: str, queries: int, scale: float, softcap: float, magnitude: float) -> None:
    """Factors whose product or quotient leaves the range of float32, though the scores themselves do not."""
    q, k, v = (randn(1, n, h, 64, seed=n).bfloat16() for n, h in ((queries, 2), (390, 1), (391, 1)))
    q, k, v = q * magnitude, k * magnitude, v[:, :390]
    lengths = [torch.tensor([390])] if op == "decode" else []
    check_16bit(op, q, k, v, *lengths, device="cuda", scale=scale, softcap=softcap)


def test_very_many_heads_over_one_key() -> None:
    """Two blocks of rows, and heads enough that keys in L2 times heads leaves 32 bits."""
    q = torch.zeros(193, 16385, 64, dtype=torch.bfloat16, device="cuda")
    v = randn(1, 1, 64, dtype=torch.bfloat16).cuda()
    queries, keys = (torch.tensor([0, n], device="cuda") for n in (193, 1))
    out, lse = flashq.prefill_varlen(q, v, v, queries, keys, causal=True)
    assert torch.equal(out[192], v[0].expand(16385, 64))
    assert not out[:192].any()
    assert not lse[:, 192].any()
    assert (lse[:, :192] == -INF).all()


@pytest.mark.contract(6)
def test_one_visible_key_among_split_ones() -> None:
    """Few tiles of rows, many keys: the first row's only key is in one split."""
    q, k, v = (randn(1, 4200, 1, 64, dtype=torch.bfloat16, seed=i).cuda() for i in range(3))
    v[0, 0, 0, ::2] = -0.0
    out, lse = flashq.prefill(q, k, v, causal=True)
    assert golden.same_bits(out[0, 0].cpu(), v[0, 0].cpu())
    torch.testing.assert_close(lse[0, 0, 0], q[0, 0, 0].float() @ k[0, 0, 0].float() / 8)


@pytest.mark.contract(8)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_queries_over_split_keys(dim: int) -> None:
    """Sequences of many queries and of none, long and short caches, and rows of no sequence behind them."""
    lengths, queries = (9000, 70, 5000, 4100), (100, 70, 0, 30)
    keys, values = ([randn(n, 2, dim, dtype=torch.bfloat16, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 9))
    cache = page_out(keys, values, 64)
    q = randn(sum(queries) + 40, 8, dim, dtype=torch.bfloat16)
    offsets = torch.tensor([0, *queries]).cumsum(0)
    out, lse = call("decode", q, *cache[:2], cache.seqlens, cache.block_table, offsets, device="cuda")
    assert not out[200:].any()
    assert (lse[:, 200:] == -INF).all()
    for b, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        rows = q[begin:end][None]
        where = (cache.seqlens[b : b + 1], cache.block_table[b : b + 1])
        if end > begin:
            compare_16bit(
                out[None, begin:end],
                lse[None, :, begin:end].contiguous(),
                "decode",
                rows,
                *cache[:2],
                *where,
                on_cuda=True,
            )


@pytest.mark.contract(12, 13)
@pytest.mark.parametrize("expanded", [False, True])
def test_partial_results_of_split_keys_take_little_memory(expanded: bool) -> None:
    """Of 100 sequences, all with 5 heads of 130 queries: at once they were 266 MB, or more."""
    batch = 100
    q = randn(batch, 130, 5, 128, dtype=torch.bfloat16, seed=0).cuda()
    k, v = (randn(1 if expanded else batch, 8192, 1, 128, dtype=torch.bfloat16, seed=i).cuda() for i in (1, 2))
    k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flashq.prefill(q, k, v)
    results = 2 * out.numel() + 4 * lse.numel()
    assert torch.cuda.max_memory_allocated() - before <= results + (65 << 20)
    for b in (0, 57, batch - 1):
        alone = flashq.prefill(*(x[b : b + 1] for x in (q, k, v)))
        assert torch.equal(alone[0][0], out[b])
        assert torch.equal(alone[1][0], lse[b])


@pytest.mark.contract(6)
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("score", [1e4, 1e6, 1e7])
def test_equal_large_scores_over_split_keys(op: str, dim: int, score: float) -> None:
    """Of 1e7, lse is rounded to a multiple of 1; the weights sum to 1 all the same, and out is the mean of v."""
    q_len = 1 if op == "prefill" else 40  # rows enough that decode runs the kernels of prefill
    q, k = (torch.zeros(1, length, heads, dim, dtype=torch.bfloat16) for length, heads in ((q_len, 4), (4096, 2)))
    q[..., 0] = k[..., 0] = 8
    v = randn(1, 4096, 2, dim, dtype=torch.bfloat16, seed=1) + 3
    lengths = [torch.tensor([4096])] if op == "decode" else []
    out, lse = call(op, q, k, v, *lengths, device="cuda", causal=False, scale=score / 64)
    mean = v.double().mean(1, keepdim=True).repeat_interleave(2, dim=2).expand(1, q_len, 4, dim)
    torch.testing.assert_close(out.double(), mean, rtol=2**-8, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 4, q_len), score + math.log(4096)), rtol=1e-6, atol=0)


@pytest.mark.contract(6)
@pytest.mark.parametrize("sink", [INF, NAN])
def test_rows_without_a_key_where_keys_are_split(sink: float) -> None:
    """Out is 0 whatever the sink is."""
    q, k, v = (randn(1, length, heads, 128, dtype=torch.bfloat16) for length, heads in ((45, 8), (40, 2), (40, 2)))
    start = torch.tensor([40])
    out, lse = call("decode", q, k, v, start, device="cuda", sinks=torch.full((8,), sink), kv_start=start)
    assert out.eq(0).all()
    torch.testing.assert_close(lse, torch.full((1, 8, 45), sink), equal_nan=True)


@pytest.mark.contract(16)
def test_more_tiles_than_a_grid_has() -> None:
    """Of one row each, written by the kernel for strides that the TMA refuses."""
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("the results take 43 GB")
    x = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device="cuda").expand(32769, 1, 65536, 8)
    with pytest.raises(
        RuntimeError, match=r"flashq::prefill: q: expected up to 2\^31 - 1 tiles of rows, got 2147549184"
    ):
        flashq.prefill(x, x, x)


@pytest.mark.contract(2)
def test_views_of_packed_projections() -> None:
    """q, k and v as views of one tensor, as a linear layer gives them; (B, H, S, D) tensors, transposed."""
    packed = randn(2, 200, 12, 128, dtype=torch.bfloat16)
    check_16bit("prefill", packed[:, :, :8], packed[:, :, 8:10], packed[:, :, 10:], device="cuda", causal=True)
    q, k, v = (randn(2, h, 150, 128, dtype=torch.float16, seed=h).transpose(1, 2) for h in (4, 2, 2))
    check_16bit("prefill", q, k, v, device="cuda", causal=True)


@pytest.mark.contract(9)
def test_offsets_out_of_range_are_clamped() -> None:
    q, k, v = (randn(50, h, 64, dtype=torch.float16, seed=h) for h in (4, 2, 3))
    v = v[:, :2].contiguous()
    for bad_q, good_q, bad_k, good_k in (
        ((0, 20, 10, 50), (0, 20, 20, 50), (0, 30, 40, 50), (0, 30, 40, 50)),
        ((0, 20, 10**6, 50), (0, 20, 50, 50), (0, -7, 40, 10**9), (0, 0, 40, 50)),
        ((0, -5, 30, 40), (0, 0, 30, 40), (0, 50, 20, 50), (0, 50, 50, 50)),
    ):
        got = call("prefill_varlen", q, k, v, torch.tensor(bad_q), torch.tensor(bad_k), device="cuda", causal=True)
        expected = call(
            "prefill_varlen", q, k, v, torch.tensor(good_q), torch.tensor(good_k), device="cuda", causal=True
        )
        assert all(map(torch.equal, got, expected))
        assert got[0][good_q[-1] :].eq(0).all()
        assert got[1][:, good_q[-1] :].eq(-INF).all()


@pytest.mark.contract(9)
@pytest.mark.parametrize("q_len", [1, 40])
def test_lengths_and_pages_out_of_range(q_len: int) -> None:
    """Lengths and kv_start are clamped; the tokens of a page that is not there count as none."""
    cache = page_out([randn(100, 2, 64, dtype=torch.float16)], [randn(100, 2, 64, dtype=torch.float16, seed=1)], 16)
    table = cache.block_table[:, :6].contiguous()  # 96 tokens
    q = randn(1, q_len, 8, 64, dtype=torch.float16, seed=2)

    def run(length: int, table: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        more = (torch.tensor([length]), table, None, torch.tensor([start]))
        return call("decode", q, *cache[:2], *more, device="cuda", causal=False)

    assert all(map(torch.equal, run(10**9, table), run(96, table)))
    out, lse = run(-3, table)
    assert out.eq(0).all()
    assert lse.eq(-INF).all()
    assert all(map(torch.equal, run(90, table, 10**9), run(90, table, 90)))
    assert all(map(torch.equal, run(90, table, -4), run(90, table)))
    for bad in (-1, len(cache.k), 2**31 - 1):
        holed = table.clone()
        holed[0, 2:] = bad
        for got, expected in zip(run(96, holed), run(32, table), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
        out, lse = run(96, torch.full_like(table, bad))
        assert out.eq(0).all()
        assert lse.eq(-INF).all()
    out, lse = run(96, table[:, :0])  # no room for any token
    assert out.eq(0).all()
    assert lse.eq(-INF).all()


@pytest.mark.contract(11)
@pytest.mark.parametrize("aligned", [True, False])
def test_tensors_of_more_than_2_to_the_31_elements(aligned: bool) -> None:
    """Slices of the results against eager attention on slices of the inputs, around and past 2^31 elements."""
    heads, dim, window, last = 4, 128, 100, 1000
    tokens = 2**31 // (heads * dim) + 300
    room = torch.empty(tokens * heads * dim + 1, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, len(room), 2**30):
        room[begin : begin + 2**30].normal_()
    x = (room[:-1] if aligned else room[1:]).view(tokens, heads, dim)
    ends = torch.tensor([0, tokens - last, tokens], device="cuda")
    out, lse = flashq.prefill_varlen(x, x, x, ends, ends, window_left=window, causal=True)
    for begin, end in ((0, 500), (tokens // 2, tokens // 2 + 300), (tokens - last - 300, tokens - last)):
        keys = x[None, max(0, begin - window) : end]
        got = (t.cpu() for t in (out[None, begin:end], lse[None, :, begin:end].contiguous()))
        compare_16bit(*got, "prefill", x[None, begin:end], keys, keys, on_cuda=True, window_left=window, causal=True)
    alone = x[None, -last:]
    got = (t.cpu() for t in (out[None, -last:], lse[None, :, -last:].contiguous()))
    compare_16bit(*got, "prefill", alone, alone, alone, on_cuda=True, window_left=window, causal=True)
    # Few queries at the end of many keys.
    q, few = x[:3], torch.tensor([0, 3], device="cuda")
    got = (t[None].cpu() for t in flashq.prefill_varlen(q, x, x, few, ends[:2], window_left=window, causal=True))
    keys = x[None, tokens - last - 3 - window : tokens - last]
    compare_16bit(*got, "prefill", q[None], keys, keys, on_cuda=True, window_left=window, causal=True)


@pytest.mark.contract(9)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("q_len", [1, 40])
def test_lengths_out_of_range_without_a_table(q_len: int, index_dtype: torch.dtype) -> None:
    """The cache lies in a room full of NaN, which a length past its page would read."""
    k_room, v_room = torch.full((2, 5, 100, 2, 64), NAN, dtype=torch.float16)
    k, v = k_room[1:4], v_room[1:4]
    k[:], v[:] = randn(3, 100, 2, 64, dtype=torch.float16), randn(3, 100, 2, 64, dtype=torch.float16, seed=1)
    q = randn(3, q_len, 8, 64, dtype=torch.float16, seed=2)
    limits = torch.iinfo(index_dtype)

    def run(lengths: tuple[int, ...], starts: tuple[int, ...], **options: int) -> tuple[Tensor, Tensor]:
        index = (torch.tensor(x, dtype=index_dtype) for x in (lengths, starts))
        seqlens, kv_start = index
        return call("decode", q, k, v, seqlens, None, None, kv_start, device="cuda", **options)

    for wild, tame in (
        (((101, limits.min, limits.max), (0, 0, 0)), ((100, 0, 100), (0, 0, 0))),
        (((-1, 70, 300), (3, limits.min, limits.max)), ((0, 70, 100), (0, 0, 100))),
        (((limits.max, 50, 60), (limits.max, 51, -5)), ((100, 50, 60), (100, 50, 0))),
    ):
        for options in ({}, {"window_left": 30}, {"kv_chunk": 256}):
            got, expected = run(*wild, **options), run(*tame, **options)
            assert all(map(torch.equal, got, expected))
            assert not got[0].isnan().any()
    check_16bit("decode", q, k, v, torch.tensor([100, 0, 100], dtype=index_dtype), device="cuda")


@pytest.mark.contract(12)
def test_a_graph_replays_with_other_lengths_beside_another_graph() -> None:
    q, k, v = (torch.randn(300, h, 64, device="cuda").half() for h in (4, 2, 2))
    graphs, cus, results = [], [], []
    for _ in range(2):
        cu = torch.tensor([0, 100, 300], device="cuda")
        flashq.prefill_varlen(q, k, v, cu, cu, causal=True)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            results.append(flashq.prefill_varlen(q, k, v, cu, cu, causal=True))
        graphs.append(graph)
        cus.append(cu)
    streams = [torch.cuda.Stream() for _ in graphs]
    for middles in ((1, 299), (64, 0), (300, 128)):
        expected = []
        for cu, middle in zip(cus, middles, strict=True):
            cu[1] = middle
            expected.append([x.clone() for x in flashq.prefill_varlen(q, k, v, cu, cu, causal=True)])
        torch.cuda.synchronize()
        for _ in range(400):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected, strict=True):
            assert all(map(torch.equal, got, wanted))


def test_kernels_for_other_gpus() -> None:
    """Most of this file once more, by the kernel for compute capability 8.0."""
    names = ("many_tiles", "scores_far_above", "scale_and_softcap", "split", "packed")
    pass_on_sm80(__file__, "-k", " or ".join(names))
