"""Strides, 64-bit offsets and empty sizes (docs/contract.md, lines 2, 11, 14)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from accuracy import check_16bit, check_tbq4
from cases import ATTENTION, DTYPES, INF, Paged, attend, encode_pages, everywhere, lay_out, plain_dtype, randn
from torch import Tensor

import flashq


@pytest.mark.contract(14)
@everywhere(op=ATTENTION, sizes=[(0, 3, 9), (2, 0, 9), (2, 3, 0), (0, 0, 0), (1, 0, 0)])
def test_empty_sizes(op: str, sizes: tuple[int, int, int], backend: torch.device) -> None:
    batch, q_len, kv_len = sizes
    q, k = (randn(batch, n, h, 64, dtype=plain_dtype(backend)) for n, h in ((q_len, 4), (kv_len, 2)))
    out, lse = attend(op, q, k, k, device=backend)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, q_len)
    if not kv_len:
        assert not out.any()
        assert (lse == -INF).all()
    attend(op, q, k, k, device=backend, sinks=torch.zeros(4))


@pytest.mark.contract(14)
@everywhere(op=["decode", "tbq4_attention"])
def test_no_pages_and_no_table_entries(op: str, backend: torch.device) -> None:
    dtype = plain_dtype(backend)
    none = torch.empty(0, 16, 2, 64, dtype=dtype)
    cache = Paged(none, none, torch.empty(3, 0).int(), torch.zeros(3).int())
    check: Callable = check_tbq4 if op == "tbq4_attention" else partial(check_16bit, "decode")
    args = encode_pages(cache).args() if op == "tbq4_attention" else (*cache[:2], cache.seqlens, cache.block_table)
    out, lse = check(randn(3, 2, 4, 64, dtype=dtype), *args, device=backend)
    assert not out.any()
    assert (lse == -INF).all()
    cu = torch.zeros(1, dtype=torch.int64)
    out, lse = check(
        randn(5, 4, 64, dtype=dtype), *args[:-2], cache.seqlens[:0], cache.block_table[:0], cu, device=backend
    )
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
@everywhere(layout=["heads_first", "padded"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(layout: str, backend: torch.device) -> None:
    if backend.type == "cuda" and layout == "padded":
        layout = "spaced"  # what 16-byte loads cannot read may be another kernel's
    for dtype in DTYPES if backend.type == "cpu" else DTYPES[1:]:
        q, k, v = (randn(2, 40, h, 80, dtype=dtype, seed=h) for h in (4, 2, 3))
        v = v[:, :, :2].contiguous()
        for op in ("prefill", "decode"):
            plain = attend(op, q, k, v, device=backend)
            for which in ((0,), (1,), (2,), (0, 1, 2)):  # each has strides of its own
                views = (lay_out(x, layout) if i in which else x for i, x in enumerate((q, k, v)))
                strided = attend(op, *views, device=backend)
                assert all(map(torch.equal, plain, strided))


@pytest.mark.contract(2)
@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_an_exact_pool_of_any_strides_gives_the_bits_of_a_contiguous_one(layout: str, backend: torch.device) -> None:
    q, k, v = (randn(1, n, h, 64, dtype=plain_dtype(backend), seed=h) for n, h in ((2, 4), (40, 2), (40, 3)))
    v = v[:, :, :2].contiguous()

    def run(exact_k: Tensor, exact_v: Tensor) -> tuple[Tensor, Tensor]:
        pool = {"exact_k": exact_k, "exact_v": exact_v, "exact_block_table": torch.tensor([[0]])}
        return attend("tbq4_attention", q, k, v, device=backend, exact_first=4, exact_last=20, **pool)

    # attend() encodes k and v; the pool holds them as they are.
    plain = run(k, v)
    for strided in ((lay_out(k, layout), v), (k, lay_out(v, layout))):
        assert all(map(torch.equal, plain, run(*strided)))
