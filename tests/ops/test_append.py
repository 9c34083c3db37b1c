"""kv_append_ and tbq4_append_: the right bytes in the right slots, and not one byte elsewhere."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, LAYOUTS, lay_out, randn

import flashq
from flashq import reference, tbq4

INDEX_DTYPES = (torch.int32, torch.int64)


def make_slots(tokens: int, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    """Different slots in no order, the last one of the cache among them, some skipped."""
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[0] = capacity - 1 if capacity - 1 not in slots[1:].tolist() else slots[0]
    slots[3::5] = torch.tensor([-1, -(2**31)]).repeat(tokens)[: len(slots[3::5])]
    return slots.to(dtype)


@pytest.mark.contract(2, 3, 9)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_kv_append(page_size: int, dtype: torch.dtype, layout: str, backend: torch.device) -> None:
    for head_dim in (8, 80, 128):
        for index_dtype in INDEX_DTYPES:
            pages = 96 // page_size
            k, v = (randn(37, 3, head_dim, dtype=dtype, seed=i) for i in (1, 2))
            caches = [randn(pages, page_size, 3, head_dim, dtype=dtype, seed=i) for i in (3, 4)]
            k[0, 0, 0] = float("nan")  # a copy, whatever the bits
            slots = make_slots(37, pages * page_size, index_dtype)
            k, v = (lay_out(x.to(backend), layout) for x in (k, v))
            cache_layout = "padded" if layout == "one_head" else layout
            caches = [lay_out(c.to(backend), cache_layout) for c in caches]
            expected = [c.cpu() for c in caches]
            flashq.kv_append_(k, v, *caches, slots.to(backend))
            reference.kv_append_(k.cpu(), v.cpu(), *expected, slots)
            for got, truth in zip(caches, expected, strict=True):
                torch.testing.assert_close(got.cpu(), truth, rtol=0, atol=0, equal_nan=True)


@pytest.mark.contract(2)
@pytest.mark.parametrize("strided", range(4))
def test_every_tensor_of_an_append_has_strides_of_its_own(strided: int, backend: torch.device) -> None:
    tensors = [randn(n, *page, 2, 24, seed=i) for i, (n, page) in enumerate([(5, ()), (5, ()), (3, (4,)), (3, (4,))])]
    at_home = (x.to(backend, copy=True) for x in tensors)
    k, v, *caches = (lay_out(x, "padded") if i == strided else x for i, x in enumerate(at_home))
    slots = torch.tensor([11, 0, 6, -1, 3])
    flashq.kv_append_(k, v, *caches, slots.to(backend))
    reference.kv_append_(*tensors, slots)
    assert all(torch.equal(c.cpu(), truth) for c, truth in zip(caches, tensors[2:], strict=True))
    if strided < 2:  # planes are contiguous
        k, v = (randn(5, 2, 64, seed=i) for i in range(2))
        codes, norms = torch.zeros(3, 2, 4, 32, dtype=torch.uint8), torch.zeros(3, 2, 4, 1, dtype=torch.float16)
        expected = [x.clone() for x in (codes, norms, codes, norms)]
        got = [x.to(backend, copy=True) for x in expected]
        rows = [lay_out(x.to(backend), "padded" if i == strided else "contiguous") for i, x in enumerate((k, v))]
        flashq.tbq4_append_(*rows, *got, slots.to(backend))
        reference.tbq4_append_(k, v, *expected, slots)
        assert all(torch.equal(x.cpu(), truth) for x, truth in zip(got, expected, strict=True))


@pytest.mark.contract(2, 3, 9, 17)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_tbq4_append(page_size: int, dtype: torch.dtype, layout: str, backend: torch.device) -> None:
    for head_dim in tbq4.HEAD_DIMS:
        for offsets_kind in ("none", "plain", "strided"):
            pages, blocks = 96 // page_size, head_dim // tbq4.block_width(head_dim)
            k, v = (lay_out(randn(37, 3, head_dim, dtype=dtype, seed=i).to(backend), layout) for i in (1, 2))
            planes = []
            for seed in (5, 6):
                random = torch.Generator().manual_seed(seed)
                planes.append(
                    torch.randint(0, 256, (pages, 3, page_size, head_dim // 2), generator=random, dtype=torch.uint8)
                )
                planes.append(randn(pages, 3, page_size, blocks, dtype=torch.float16, seed=seed))
            expected = [p.clone() for p in planes]
            offsets = None if offsets_kind == "none" else (5 * randn(pages, 3, head_dim, seed=7)).half()
            slots = make_slots(37, pages * page_size, INDEX_DTYPES[head_dim == 64])
            reference.tbq4_append_(k.cpu(), v.cpu(), *expected, slots, offsets)
            if offsets is not None:
                offsets = lay_out(offsets.to(backend), "padded" if offsets_kind == "strided" else "contiguous")
            planes = [p.to(backend) for p in planes]
            flashq.tbq4_append_(k, v, *planes, slots.to(backend), offsets)
            for got, truth in zip(planes, expected, strict=True):
                assert torch.equal(got.view(torch.uint8).cpu(), truth.view(torch.uint8))


@pytest.mark.contract(14)
def test_nothing_to_append(backend: torch.device) -> None:
    cache = torch.ones(2, 4, 1, 64, device=backend)
    none = torch.empty(0, 1, 64, device=backend)
    flashq.kv_append_(none, none, cache, cache.clone(), torch.empty(0, dtype=torch.int32, device=backend))
    skipped = torch.full((4,), -1, device=backend)
    for empty in (cache[:0], cache[:, :0]):
        flashq.kv_append_(cache[0], cache[0], empty, empty, skipped)
    flashq.kv_append_(cache[0, :, :0], cache[0, :, :0], cache[:, :, :0], cache[:, :, :0], skipped)
    flashq.kv_append_(cache[0, ..., :0], cache[0, ..., :0], cache[..., :0], cache[..., :0], skipped)
    assert torch.equal(cache.cpu(), torch.ones(2, 4, 1, 64))
    planes = [torch.zeros(0, 1, 4, 32, dtype=torch.uint8), torch.zeros(0, 1, 4, 1, dtype=torch.float16)] * 2
    flashq.tbq4_append_(cache[0], cache[0], *(p.to(backend) for p in planes), skipped)


@pytest.mark.contract(9)
def test_slots_past_the_cache_write_nothing() -> None:
    k, cache = torch.ones(3, 1, 64), torch.zeros(2, 4, 1, 64)
    planes = [torch.zeros(2, 1, 4, 32, dtype=torch.uint8), torch.zeros(2, 1, 4, 1, dtype=torch.float16)]
    planes += [p.clone() for p in planes]
    for slots in ([0, 1, 8], [0, 2**40, 1]):
        with pytest.raises(RuntimeError, match=r"flashq::kv_append_: slots\[\d\]: expected .* below .* 8.*, got"):
            flashq.kv_append_(k, k, cache, cache, torch.tensor(slots))
        with pytest.raises(RuntimeError, match=r"flashq::tbq4_append_: slots\[\d\]: expected .* below .* 8.*, got"):
            flashq.tbq4_append_(k, k, *planes, torch.tensor(slots))
    assert not cache.any()
    assert not any(p.any() for p in planes)


@pytest.mark.cuda
@pytest.mark.contract(9)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_slots_past_the_cache_are_skipped_on_cuda(index_dtype: torch.dtype) -> None:
    """Nothing around the cache is written, in a room of which the cache is the middle."""
    k = torch.ones(6, 2, 64, device="cuda")
    room = torch.zeros(2, 12, 4, 2, 64, device="cuda")
    caches = room[:, 4:8]
    top = torch.iinfo(index_dtype).max
    slots = torch.tensor([16, 3, 2**30, top, -top - 1, 17], dtype=index_dtype, device="cuda")
    for k_cache, v_cache, written in ((*caches, 2), (*caches[:, :0], 0), (*caches[:, :, :0], 0)):
        room.zero_()
        flashq.kv_append_(k, k, k_cache, v_cache, slots)
        assert caches[:, 0, 3].sum() == written * 128
        assert room.sum() == written * 128


def test_append_then_attend(isa: str) -> None:
    """What the append writes, attention reads: 16-bit and TBQ4 caches filled token by token."""
    k, v = (randn(40, 2, 64, dtype=torch.bfloat16, seed=i) for i in (1, 2))
    q = randn(1, 3, 4, 64, dtype=torch.bfloat16)
    table = torch.tensor([[2, 0, 1]])
    caches = [torch.full((3, 16, 2, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    planes = [torch.full((3, 2, 16, 32), 255, dtype=torch.uint8), torch.full((3, 2, 16, 1), float("nan")).half()]
    planes += [p.clone() for p in planes]
    for t in range(40):
        slots = table[0, t // 16].reshape(1) * 16 + t % 16
        flashq.kv_append_(k[t : t + 1], v[t : t + 1], *caches, slots)
        flashq.tbq4_append_(k[t : t + 1], v[t : t + 1], *planes, slots)
    out, lse = flashq.decode(q, *caches, torch.tensor([40]), table)
    truth, true_lse = reference.prefill(q, k[None], v[None], causal=True)
    torch.testing.assert_close(out.float(), truth, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=1e-4)
    decoded = [reference.tbq4_dequantize(*reference.tbq4_quantize(x))[None] for x in (k, v)]
    out, lse = flashq.tbq4_attention(q, *planes, torch.tensor([40]), table, out_dtype=torch.float32)
    truth, true_lse = reference.prefill(q, *decoded, causal=True)
    assert ((out - truth).norm() / truth.norm()) < 2e-3
    torch.testing.assert_close(lse, true_lse, rtol=0, atol=2e-3)
