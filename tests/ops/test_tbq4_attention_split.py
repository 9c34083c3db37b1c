"""tbq4_attention on CUDA where a call is cut into pieces: contexts of several blocks of threads, many short sequences,
rows beyond one item, pools and windows across the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accuracy import check_tbq4
from cases import call, case_id, encode_pages, lay_out, make_sinks, page_out, pairwise, randn
from smaller_gpus import pass_on_sm80
from torch import Tensor

pytestmark = pytest.mark.cuda

CASES = pairwise(
    head_dim=(128, 256, 64),
    dtype=(torch.float16, torch.bfloat16),
    group=(4, 1, 6, 8, 9, 16),
    q_len=(1, 2, 4, 9),
    lengths=((5000,), (2000, 1, 0, 3001), (513,) * 9, tuple(range(1, 1400, 67))),
    page_size=(64, 16, 48, 1, 7),
    window_left=(-1, 0, 1500),
    kv_start=(False, True),
    offsets=(False, True),
    exact=((0, 0), (4, 64), (0, 700), (3, 0)),
    softcap=(0.0, 20.0),
    sinks=("none", "some"),
    scale=(None, 0.6),
    kv_chunk=(0, 320, 1024),
)


def build(case: dict) -> tuple[list[Tensor | None], dict]:
    """Arguments and options of tbq4_attention, on the CPU."""
    dim, lengths, dtype, heads = case["head_dim"], case["lengths"], case["dtype"], 2
    direction = 10 * randn(heads, dim, seed=3)
    shift = direction if case["offsets"] else torch.zeros(())
    keys = [(randn(n, heads, dim, seed=i) + shift).to(dtype) for i, n in enumerate(lengths)]
    values = [randn(n, heads, dim, dtype=dtype, seed=50 + i) for i, n in enumerate(lengths)]
    starts = [n // 5 for n in lengths] if case["kv_start"] else None
    cache = page_out(keys, values, case["page_size"], kv_start=starts)
    offsets = None
    if case["offsets"]:
        offsets = (direction + 0.3 * randn(len(cache.k), heads, dim, seed=4)).half()
    first, last = case["exact"]
    pool = [cache.k, cache.v, cache.block_table] if first or last else [None] * 3
    q = randn(len(lengths), case["q_len"], heads * case["group"], dim, dtype=dtype, seed=5)
    start = None if starts is None else torch.tensor(starts)
    args = [q, *encode_pages(cache, offsets).args(), None, start, make_sinks(case["sinks"], q.shape[2]), offsets, *pool]
    options = {name: case[name] for name in ("scale", "softcap", "kv_chunk", "window_left")}
    return args, options | {"exact_first": first, "exact_last": last}


@pytest.mark.contract(1, 4, 5, 8, 10, 17)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_split_contexts(case: dict) -> None:
    args, options = build(case)
    check_tbq4(*args, device="cuda", **options)


@pytest.mark.contract(13)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_twice_the_same_bits(head_dim: int) -> None:
    args, options = build(CASES[0] | {"head_dim": head_dim, "kv_chunk": 0, "lengths": (5000, 700, 3000)})
    results = [call("tbq4_attention", *args, device="cuda", **options) for _ in range(3)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.contract(2)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_unaligned_planes_give_the_bits_of_aligned_ones(head_dim: int, offsets: bool) -> None:
    """A base that no 16-byte copy can read."""
    case = CASES[0] | {"head_dim": head_dim, "offsets": offsets, "lengths": (900, 70), "page_size": 16}
    args, options = build(case | {"exact": (0, 0), "kv_start": False})
    expected = call("tbq4_attention", *args, device="cuda", **options)
    for i in (1, 2, 3, 4):  # codes and norms of K and V
        room = args[i].new_zeros(args[i].numel() + 1)
        room[1:] = args[i].flatten()
        moved = [*args[:i], room[1:].view(args[i].shape), *args[i + 1 :]]
        got = call("tbq4_attention", *moved, device="cuda", **options)
        assert all(map(torch.equal, got, expected)), i
    if offsets:
        moved = [lay_out(x, "padded") if i == 10 else x for i, x in enumerate(args)]
        assert all(map(torch.equal, call("tbq4_attention", *moved, device="cuda", **options), expected))
    moved = [lay_out(args[0], "padded"), *args[1:]]
    assert all(map(torch.equal, call("tbq4_attention", *moved, device="cuda", **options), expected))


@pytest.mark.contract(9)
def test_values_out_of_range_read_as_no_tokens() -> None:
    """Pages outside the cache, lengths and kv_start beyond the capacity: memory-safe, the rest as if they were not."""
    args, options = build(CASES[0] | {"lengths": (900, 600), "kv_chunk": 0, "exact": (0, 0), "page_size": 64})
    args[8] = None  # sinks
    table = args[6].clone()
    table[0, 3], table[0, 7] = len(args[1]), -5
    whole = call("tbq4_attention", *args, device="cuda", out_dtype=torch.float32, **options)
    holes = call("tbq4_attention", *args[:6], table, *args[7:], device="cuda", out_dtype=torch.float32, **options)
    assert torch.equal(holes[0][1], whole[0][1])
    assert holes[0][0].isfinite().all()
    assert (holes[1][0] < whole[1][0]).all()
    options["kv_chunk"] = 256  # so that a row's bits are those of its own sequence
    seqlens = torch.tensor([900, 2**31 - 1], dtype=torch.int32)
    out, _ = call("tbq4_attention", *args[:5], seqlens, *args[6:], device="cuda", **options)
    assert torch.equal(out[0], call("tbq4_attention", *args, device="cuda", **options)[0][0])


@pytest.mark.contract(13)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_that_the_kernel_before_writes(head_dim: int) -> None:
    """A call starts while the one before it ends: bits of its lse, all of them numbers beyond the capacity, are lengths
    here, which are 0 until it has ended."""
    case = {"head_dim": head_dim, "lengths": (576,) * 70, "page_size": 64, "kv_start": False, "group": 4, "q_len": 1}
    args, options = build(CASES[0] | case | {"exact": (0, 0), "kv_chunk": 0, "sinks": "none", "window_left": -1})
    args = [None if x is None else x.cuda() for x in args]
    attend = torch.ops.flashq.tbq4_attention
    args[6] = args[6][:, :9]  # entries of pages that there are
    args[5] = torch.full((70,), 576, dtype=torch.int32, device="cuda")
    expected = attend(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attend(torch.zeros_like(args[0]), *args[1:], **options)
        got = attend(*args[:5], lse.view(torch.int32)[:, 0, 0], *args[6:], **options)
    for _ in range(20):
        lse.zero_()
        graph.replay()
        assert all(map(torch.equal, got, expected))


def test_smaller_gpus() -> None:
    """The kernels of compute capability 8.0, with the shared memory of 8.6."""
    pass_on_sm80(str(Path(__file__).with_name("test_tbq4_attention_numerics.py")), shared_bytes=99 << 10)
