"""decode on CUDA: what could go wrong where a device plans the splits itself, and keys of one row meet again later."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from accuracy import check_16bit
from cases import call, move, page_out, randn
from smaller_gpus import pass_on_sm80
from torch import Tensor

import flashq
from flashq import reference

pytestmark = pytest.mark.cuda

RAGGED = (3000, 1, 0, 777, 64, 5000, 513)


def make_cache(
    lengths: tuple[int, ...], *, kv_heads: int = 2, dim: int = 64, page_size: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k_cache, v_cache, seqlens, block_table on the CPU. Values do not depend on the page size and its order."""
    keys, values = (
        [randn(n, kv_heads, dim, dtype=torch.bfloat16, seed=s + n) for n in lengths] for s in (1, 1_000_000)
    )
    cache = page_out(keys, values, page_size, seed=seed)
    return cache.k, cache.v, cache.seqlens, cache.block_table


@pytest.mark.parametrize(
    ("dim", "group", "q_len"),
    [
        (64, 1, 1),
        (64, 4, 16),
        (64, 63, 1),
        (128, 4, 1),
        (128, 7, 2),
        (128, 16, 1),
        (128, 8, 4),
        (128, 5, 7),
        (128, 4, 16),
        (104, 63, 1),
        (256, 6, 1),
        (256, 16, 1),
        (256, 6, 4),
        (256, 4, 16),
    ],
)
@pytest.mark.parametrize("kv_chunk", [0, 512])
def test_ragged_lengths(dim: int, group: int, q_len: int, kv_chunk: int) -> None:
    """Every kernel: up to 8, 16, 32 and 64 rows of each head dim."""
    kv_heads = 1 if group > 8 else 2
    cache = make_cache(RAGGED, kv_heads=kv_heads, dim=dim)
    q = randn(len(RAGGED), q_len, kv_heads * group, dim, dtype=torch.bfloat16)
    sinks = randn(kv_heads * group, seed=5)
    check_16bit("decode", q, *cache, device="cuda", big=True, kv_chunk=kv_chunk, sinks=sinks)


@pytest.mark.parametrize("length", [0, 1, 17, 1000, 4096])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "q_len"),
    [(8, 4, 128, 1), (1, 16, 64, 3), (3, 6, 256, 1), (33, 1, 128, 2), (2, 12, 80, 5)],
)
def test_one_sequence(length: int, kv_heads: int, group: int, dim: int, q_len: int) -> None:
    """Few items: clusters of 16, 8, 4 and fewer blocks where the GPU has them, one launch each."""
    cache = make_cache((length,), kv_heads=kv_heads, dim=dim)
    q = randn(1, q_len, kv_heads * group, dim, dtype=torch.bfloat16)
    check_16bit("decode", q, *cache, device="cuda", sinks=randn(kv_heads * group, seed=5))
    if length > 1:
        start = torch.tensor([length // 3])
        check_16bit("decode", q, *cache, None, start, device="cuda", window_left=length // 2)


@pytest.mark.parametrize(("group", "q_len", "dim"), [(1, 1, 64), (4, 1, 128), (4, 16, 128), (6, 3, 256), (16, 4, 256)])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8, 16])
def test_short_sequences(blocks: int, group: int, q_len: int, dim: int) -> None:
    """One launch, in which so many blocks share each item, a single one too."""
    items = torch.cuda.get_device_properties(0).multi_processor_count // blocks
    cache = make_cache(tuple(7 * i % 450 for i in range(items)), kv_heads=1, dim=dim)
    q = randn(items, q_len, group, dim, dtype=torch.bfloat16)
    check_16bit("decode", q, *cache, device="cuda", sinks=randn(group, seed=5))


@pytest.mark.parametrize(
    ("batch", "length", "kv_heads", "group"),
    [
        # What 132 multiprocessors make of them:
        (66, 600, 2, 4),  # one block for each item
        (250, 530, 1, 4),  # half a block
        (33, 2100, 1, 4),  # four blocks
        (8, 8300, 1, 16),  # 16 blocks; of 64 rows, 33 teams that do not merge
        (250, 530, 8, 1),  # half a team
        (33, 1200, 1, 4),  # a cluster of up to 4 blocks
        (7, 3000, 1, 16),  # and of up to 16
    ],
)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("step", [0, 1, 100])
def test_sequences_that_are_alike(batch: int, length: int, kv_heads: int, group: int, q_len: int, step: int) -> None:
    """Of one length, nearly, or not at all: items are divided evenly, or the units of all of them are."""
    cache = make_cache(tuple(length - step * (i % 5) for i in range(batch)), kv_heads=kv_heads)
    check_16bit("decode", randn(batch, q_len, kv_heads * group, 64, dtype=torch.bfloat16), *cache, device="cuda")


@pytest.mark.parametrize("short", [16, 17, 100, 128, 200])
@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_a_short_sequence_among_long_ones_that_are_alike(short: int, q_len: int) -> None:
    """An item that one block has alone, where those of the others have several."""
    cache = make_cache((4096,) * 20 + (short,) + (4096,) * 12, kv_heads=1)
    check_16bit("decode", randn(33, q_len, 4, 64, dtype=torch.bfloat16), *cache, device="cuda")


@pytest.mark.parametrize("page_size", [64, 1])
def test_more_sequences_than_ctas(page_size: int) -> None:
    lengths = tuple(int(n) for n in torch.randint(0, 700, (400,), generator=torch.Generator().manual_seed(0)))
    cache = make_cache(lengths, page_size=page_size)
    check_16bit("decode", randn(len(lengths), 1, 8, 64, dtype=torch.bfloat16), *cache, device="cuda", big=True)


@pytest.mark.parametrize("window", [0, 1, 100, 1000])
@pytest.mark.parametrize("kv_chunk", [0, 256])
def test_windows_over_long_contexts(window: int, kv_chunk: int) -> None:
    """NaN before the window, in K, in V and in the table: tiles outside are not read."""
    k, v, seqlens, table = make_cache(RAGGED, page_size=16)
    for b, n in enumerate(RAGGED):
        for i in range(max(0, n - 3 - window) // 16):
            k[table[b, i]] = v[table[b, i]] = float("nan")
            table[b, i] = 2147480000
    q = randn(len(RAGGED), 3, 8, 64, dtype=torch.bfloat16)
    check_16bit("decode", q, k, v, seqlens, table, device="cuda", window_left=window, kv_chunk=kv_chunk)


@pytest.mark.parametrize("page_size", [16, 48, 1])
@pytest.mark.parametrize(
    "options",
    [{"window_left": 300}, {"softcap": 20.0}, {"scale": -0.1}, {"causal": False}, {"out_dtype": torch.float32}],
)
def test_options_of_64_rows(page_size: int, options: dict[str, object]) -> None:
    """Those of head dim 128 have a kernel of their own from compute capability 9.0 on."""
    cache = make_cache(RAGGED, kv_heads=2, dim=128, page_size=page_size)
    q = randn(len(RAGGED), 15, 8, 128, dtype=torch.bfloat16)
    start = torch.tensor([n // 3 for n in RAGGED])
    check_16bit("decode", q, *cache, None, start, device="cuda", big=True, **options)


@pytest.mark.parametrize("q_len", [1, 16])
def test_lengths_that_the_call_before_computes(q_len: int) -> None:
    """The plan is made while that call runs, from what lies there, and made again when its results have come."""
    q = randn(7, q_len, 8, 128, dtype=torch.bfloat16).cuda()
    k, v = (randn(7, 3008, 2, 128, dtype=torch.bfloat16, seed=seed).cuda() for seed in (1, 2))
    full = torch.full((7,), 3008, device="cuda", dtype=torch.int32)
    for i in range(6):
        # Of equal keys: lse is far above 0 or far below, and its bits are a length beyond all tokens, or below 0.
        towards = torch.full_like(q, 8 * (-1) ** i)
        lengths = torch.ops.flashq.decode(towards, torch.ones_like(k), v, full)[1].view(torch.int32)[:, 0, 0]
        got = torch.ops.flashq.decode(q, k, v, lengths)
        torch.cuda.synchronize()
        assert (lengths > 3008).all() if i % 2 == 0 else (lengths < 0).all()
        want = torch.ops.flashq.decode(q, k, v, lengths.clone())
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_packed_queries_of_very_different_numbers() -> None:
    q_lens = (1, 1, 0, 300, 2, 70, 9)
    cu = torch.tensor([0, *q_lens]).cumsum(0)
    q = randn(int(cu[-1]) + 5, 8, 64, dtype=torch.bfloat16)
    for options in ({}, {"max_seqlen_q": 1}, {"kv_chunk": 512}):
        out, lse = check_16bit("decode", q, *make_cache(RAGGED), cu, device="cuda", big=True, **options)
        assert not out[-5:].any()
        assert (lse[:, -5:] == float("-inf")).all()


@pytest.mark.contract(13)
def test_with_kv_chunk_a_rows_bits_do_not_depend_on_its_batch() -> None:
    lengths, q_lens = (3000, 3, 777, 5000, 0), (1, 2, 5, 1, 3)
    q = randn(sum(q_lens), 8, 64, dtype=torch.bfloat16)
    rows = dict(zip(lengths, q.split(q_lens), strict=True))

    def run(members: tuple[int, ...], page_size: int, seed: int, **options: int) -> dict[int, tuple[Tensor, Tensor]]:
        cu = torch.tensor([0, *(len(rows[n]) for n in members)]).cumsum(0)
        cache = make_cache(members, page_size=page_size, seed=seed)
        out, lse = call(
            "decode", torch.cat([rows[n] for n in members]), *cache, cu, device="cuda", kv_chunk=512, **options
        )
        parts = out.split([len(rows[n]) for n in members]), lse.split([len(rows[n]) for n in members], dim=1)
        return dict(zip(members, zip(*parts, strict=True), strict=True))

    whole = run(lengths, 16, 0)
    for members, page_size, seed in (
        ((5000,), 16, 1),
        ((777, 3000), 64, 2),
        ((3, 5000, 0), 48, 3),
        (lengths[::-1], 1, 4),
    ):
        for hint in (0, 1, 64):
            for n, (out, lse) in run(members, page_size, seed, max_seqlen_q=hint).items():
                assert torch.equal(out, whole[n][0])
                assert torch.equal(lse, whole[n][1])


@pytest.mark.contract(13)
@pytest.mark.parametrize("kv_chunk", [0, 512])
@pytest.mark.parametrize("group", [4, 32])
def test_the_same_bits_a_thousand_times(kv_chunk: int, group: int) -> None:
    args = [move(x, "cuda") for x in (randn(len(RAGGED), 1, 2 * group, 64, dtype=torch.bfloat16), *make_cache(RAGGED))]
    first = flashq.decode(*args, kv_chunk=kv_chunk)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(flashq.decode(*args, kv_chunk=kv_chunk), first, strict=True):
            wrong += (a != b).any()
    assert wrong.item() == 0


@pytest.mark.contract(9, 12)
@pytest.mark.parametrize("kv_chunk", [0, 512])
def test_a_graph_replays_with_other_lengths_tables_and_queries(kv_chunk: int) -> None:
    k, v, _, table = make_cache((6000,) * 4)
    slots = [
        torch.zeros(4, dtype=torch.int32),
        table,
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int32),
    ]
    q = randn(8, 8, 64, dtype=torch.bfloat16)
    fixed = [x.cuda() for x in (q, k, v)]
    seqlens, block_table, cu, start = (x.cuda() for x in slots)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    flashq.decode(*fixed, seqlens, block_table, cu, start, kv_chunk=kv_chunk)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = flashq.decode(*fixed, seqlens, block_table, cu, start, kv_chunk=kv_chunk)
    generator = torch.Generator().manual_seed(0)
    for lengths, q_ends, starts in (
        ((6000, 1, 0, 400), (0, 1, 2, 4, 8), (0, 0, 0, 0)),
        ((0, 0, 0, 0), (0, 2, 4, 6, 8), (0, 0, 0, 0)),
        ((17, 6000, 6000, 5999), (0, 0, 5, 6, 7), (3, 5000, 0, 17)),
        ((5, 6, 7, 8), (0, 1, 1, 1, 1), (5, 0, 1, 2)),
    ):
        order = torch.randperm(4, generator=generator)
        values = torch.tensor(lengths), table[order], torch.tensor(q_ends), torch.tensor(starts)
        for target, value in zip((seqlens, block_table, cu, start), values, strict=True):
            target.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        truth, true_lse = reference.decode(q, k, v, *values, dtype=torch.float64)
        torch.testing.assert_close(out.cpu().double(), truth, rtol=0, atol=0.04)
        torch.testing.assert_close(lse.cpu().double(), true_lse, rtol=0, atol=1e-4)


@pytest.mark.contract(9)
@pytest.mark.parametrize("kv_chunk", [0, 256])
def test_values_out_of_range_are_clamped(kv_chunk: int) -> None:
    k, v, _, table = make_cache((1600, 1600, 1600, 1600))
    table = table[:, :100].contiguous()
    q = randn(9, 4, 64, dtype=torch.bfloat16)

    def run(seqlens: list[int], cu: list[int], start: list[int], table: Tensor = table) -> tuple[Tensor, Tensor]:
        index = (torch.tensor(seqlens), table, torch.tensor(cu), torch.tensor(start))
        return call("decode", q, k, v, *index, device="cuda", kv_chunk=kv_chunk)

    wild = run([2**40, -5, 1600, 700], [0, 2, -7, 2**50, 3], [-1, 0, 2**33, 699])
    tame = run([1600, 0, 1600, 700], [0, 2, 2, 9, 9], [0, 0, 1600, 699])
    assert all(map(torch.equal, wild, tame))
    # Pages that do not exist hold no tokens: the sequence is its other tokens, wherever they stand.
    holes = table.clone()
    holes[0, 3:90], holes[1] = 2**31 - 1, -1
    out, lse = run([1600, 1600, 10, 10], [0, 1, 3, 4, 5], [0] * 4, holes)
    closed = torch.cat([table[:1, :3], table[:1, 90:]], dim=1)
    truth, true_lse = reference.decode(
        q[:1], k, v, torch.tensor([208]), closed, torch.tensor([0, 1]), dtype=torch.float64
    )
    torch.testing.assert_close(out[:1].double(), truth, rtol=0, atol=0.04)
    torch.testing.assert_close(lse[:, :1].double(), true_lse, rtol=0, atol=1e-4)
    assert not out[1:3].any()
    assert (lse[:, 1:3] == float("-inf")).all()


@pytest.mark.contract(6)
@pytest.mark.parametrize("kv_chunk", [0, 256])
def test_a_lone_value_keeps_its_sign_of_zero(kv_chunk: int) -> None:
    k, v, seqlens, table = make_cache((2000, 700))
    v[:] = -0.0
    q = randn(2, 3, 4, 64, dtype=torch.bfloat16)
    for dtype in (None, torch.float32):
        out, _ = call(
            "decode", q, k, v, seqlens, table, device="cuda", window_left=0, kv_chunk=kv_chunk, out_dtype=dtype
        )
        assert out.signbit().all()


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10])
def test_kernels_for_smaller_gpus(shared_bytes: int) -> None:
    names = ("test_ragged_lengths", "test_packed_queries_of_very_different_numbers")
    pass_on_sm80(*(f"{__file__}::{name}" for name in names), shared_bytes=shared_bytes)


@pytest.mark.contract(16)
@pytest.mark.parametrize("op", ["decode", "prefill", "tbq4_attention"])
def test_a_gpu_with_too_little_shared_memory(op: str) -> None:
    """An exception that says so, from every kernel that attends."""
    code = f"""
import torch, flashq
q, k = (torch.zeros(1, n, 2, 128, dtype=torch.float16, device="cuda") for n in (1, 64))
codes, norms = flashq.tbq4_quantize(k.transpose(1, 2).contiguous())
lengths = torch.tensor([64], device="cuda")
arguments = {{"decode": (k, k, lengths), "prefill": (k, k), "tbq4_attention": (codes, norms, codes, norms, lengths)}}
try:
    flashq.{op}(q, *arguments["{op}"])
except RuntimeError as error:
    print(error)
"""
    env = os.environ | {"FLASHQ_CUDA_ARCH": "80", "FLASHQ_CUDA_SMEM": "1024"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert re.match(rf"flashq::{op}: device: expected .* shared memory .*, got 1024", done.stdout), done.stdout
