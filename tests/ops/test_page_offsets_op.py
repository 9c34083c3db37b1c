"""tbq4_page_offsets_: the offsets of the pages that an append opens, to the bit, and no byte of any other page."""

from __future__ import annotations

import pytest
import torch
from accuracy import using_threads
from cases import DTYPES, NAN, lay_out, randn
from torch import Tensor

import flashq
from flashq import reference, tbq4

PAGES, WIDTH, HEADS = 40, 12, 2


def integers(low: int, high: int, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def make_call(page_size: int, head_dim: int, dtype: torch.dtype, seed: int, *, pool: bool, padding: bool) -> list:
    """Three sequences of any length, with any part of them new, over planes and offsets of random bytes."""
    g = torch.Generator().manual_seed(seed)
    lengths = integers(1, min(WIDTH * page_size, 330), 3, g)
    added = [min(n, length) for n, length in zip(integers(0, 200, 3, g), lengths, strict=True)]
    if seed % 3 == 0:
        added = [1, 1, 1]
    if seed % 3 == 1:
        lengths[0], added[0] = (lengths[0] - 1) // page_size * page_size + 1, 1  # a page's first key, and no other
    k = lay_out((randn(sum(added), HEADS, head_dim, seed=seed) + 5).to(dtype), "padded" if seed % 2 else "heads_first")
    codes = torch.randint(0, 256, (PAGES, HEADS, page_size, head_dim // 2), generator=g).to(torch.uint8)
    norms = randn(PAGES, HEADS, page_size, head_dim // tbq4.block_width(head_dim), seed=seed).abs().half()
    offsets = lay_out(randn(PAGES, HEADS, head_dim, seed=seed + 1).half(), "padded")
    table = torch.randperm(PAGES, generator=g)[: 3 * WIDTH].view(3, WIDTH).to(torch.int32)
    starts = torch.tensor([integers(0, n, 1, g)[0] for n in lengths]) if padding else None
    exact_k = exact_table = None
    if pool:
        exact_k = lay_out(randn(9, 16, HEADS, head_dim, seed=seed + 2).to(dtype), "padded")
        exact_table = torch.randint(-4, 13, (3, 10), generator=g)
    ends = torch.tensor([0, *added]).cumsum(0)
    return [k, codes, norms, offsets, torch.tensor(lengths), table, ends, starts, exact_k, exact_table]


def run_both(call: list) -> tuple[Tensor, Tensor]:
    results = []
    for function in (flashq.tbq4_page_offsets_, reference.tbq4_page_offsets_):
        offsets = lay_out(call[3], "padded")
        function(*call[:3], offsets, *call[4:])
        results.append(offsets)
    return results[0], results[1]


@pytest.mark.contract(2, 3, 9, 17)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
def test_bits_of_the_reference(page_size: int, padding: bool, pool: bool, isa: str) -> None:
    changed = 0
    for seed in range(12):
        head_dim, dtype = tbq4.HEAD_DIMS[seed % 3], DTYPES[seed // 3 % 3]
        call = make_call(page_size, head_dim, dtype, seed, pool=pool, padding=padding)
        got, expected = run_both(call)
        assert torch.equal(got, expected)
        changed += int((got != call[3]).any(-1).any(-1).sum())
    assert changed > 12


@pytest.mark.contract(9)
def test_earlier_keys_whose_page_is_gone_do_not_count() -> None:
    call = make_call(16, 64, torch.float32, 1, pool=False, padding=False)
    call[4][0], call[6] = 49, torch.tensor([0, 1, 1, 1])  # opens page 3
    call[5][0, 0], call[5][0, 2] = -1, 2147480000
    got, expected = run_both(call)
    keys = call[1][call[5][0, 1].long()], call[2][call[5][0, 1].long()]
    page = int(call[5][0, 3])
    decoded = reference.tbq4_dequantize(*keys).transpose(0, 1) + call[3][call[5][0, 1].long()].float()
    torch.testing.assert_close(got[page].float(), decoded.mean(0), rtol=2e-3, atol=2e-3)
    assert torch.equal(got, expected)
    call[5][0, 1] = -1  # none is left: the page's own key
    got, _ = run_both(call)
    assert torch.equal(got[page], call[0][0].half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_of_the_host(dtype: torch.dtype) -> None:
    """Token by token and in pieces, what `flashq.tbq4.page_offsets` gives of the raw keys."""
    keys = (randn(300, HEADS, 64) + 4).to(dtype)
    for pieces in ((300,), (1,) * 150, (5, 60, 64, 1, 100), (70, 200)):
        codes, norms = torch.zeros(20, HEADS, 64, 32, dtype=torch.uint8), torch.zeros(20, HEADS, 64, 1).half()
        offsets, expected = torch.zeros(20, HEADS, 64).half(), torch.zeros(20, HEADS, 64).half()
        pool, table = keys[:288].unflatten(0, (18, 16)), torch.arange(20)[None]
        start = 0
        for count in pieces:
            new, length = keys[start : start + count], start + count
            more = (torch.tensor([length]), table, torch.tensor([0, count]), None, pool, table[:, :18])
            flashq.tbq4_page_offsets_(new, codes, norms, offsets, *more)
            first, opened = tbq4.page_offsets(new, start, 64, keys[:start])
            expected[first : first + len(opened)] = opened
            start = length
        torch.testing.assert_close(offsets, expected, rtol=1e-3, atol=0)  # another order of the same sum
        assert offsets[: -(-start // 64)].all()


@pytest.mark.contract(7, 8)
def test_poison_stays_where_it_is() -> None:
    """A NaN or an Inf in a key, raw or decoded, leaves the offset finite; padding is not read at all."""
    keys = randn(64, HEADS, 64) + 2
    bad = keys.clone()
    bad[3, 0, 5], bad[4, 1, 6], bad[:2] = NAN, float("inf"), NAN
    codes, norms = torch.zeros(2, HEADS, 64, 32, dtype=torch.uint8), torch.zeros(2, HEADS, 64, 1).half()
    offsets, table = torch.full((2, HEADS, 64), NAN).half(), torch.tensor([[1, 0]])
    more = (torch.tensor([64]), table, torch.tensor([0, 64]), torch.tensor([2]))
    flashq.tbq4_page_offsets_(bad, codes, norms, offsets, *more)
    expected = keys[2:].mean(0)
    expected[0, 5] = (keys[2:].sum(0)[0, 5] - keys[3, 0, 5]) / 61
    expected[1, 6] = (keys[2:].sum(0)[1, 6] - keys[4, 1, 6]) / 61
    torch.testing.assert_close(offsets[1].float(), expected, rtol=1e-3, atol=1e-3)
    norms[1, :, 7] = NAN  # a key that was encoded as poison, before a page that opens
    norms[1, :, :2] = NAN
    flashq.tbq4_page_offsets_(keys[:1], codes, norms, offsets, torch.tensor([65]), table, torch.tensor([0, 1]), more[3])
    assert offsets[0].isfinite().all()


def test_offsets_are_clamped_to_fp16() -> None:
    keys = torch.full((4, 1, 64), 1e38)
    keys[:, :, 1] *= -1
    planes = torch.zeros(1, 1, 4, 32, dtype=torch.uint8), torch.zeros(1, 1, 4, 1).half()
    offsets = torch.zeros(1, 1, 64).half()
    flashq.tbq4_page_offsets_(keys, *planes, offsets, torch.tensor([4]), torch.tensor([[0]]), torch.tensor([0, 4]))
    assert (offsets[0, 0, :2] == torch.tensor([65504.0, -65504.0])).all()


@pytest.mark.contract(13, 14)
def test_threads_and_empty_sizes() -> None:
    call = make_call(16, 128, torch.bfloat16, 2, pool=True, padding=False)
    one, _ = run_both(call)
    for threads in (2, 5):
        with using_threads(threads):
            assert torch.equal(run_both(call)[0], one)
    none = call[0][:0], *call[1:4]
    flashq.tbq4_page_offsets_(*none, torch.tensor([5]), call[5][:1], torch.tensor([0, 0]))
    flashq.tbq4_page_offsets_(*none, call[4][:0], call[5][:0], torch.tensor([0]))
    empty = call[1][:, :, :0].contiguous(), call[2][:, :, :0].contiguous()
    flashq.tbq4_page_offsets_(call[0][:0], *empty, call[3], call[4][:0], call[5][:0], torch.tensor([0]))
    with pytest.raises(RuntimeError, match="k_codes: expected pages of at least one token"):
        flashq.tbq4_page_offsets_(call[0], *empty, call[3], call[4], call[5], call[6])


def on_gpu(call: list) -> list:
    """The same strides on the GPU."""
    return [lay_out(x.cuda(), "padded" if x.dim() > 2 and x.is_floating_point() and not x.is_contiguous() else "")
            if isinstance(x, Tensor) else x for x in call]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.contract(2, 3, 12, 17)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
def test_bits_of_the_reference_on_cuda(page_size: int, pool: bool) -> None:
    for seed in range(18):
        head_dim, dtype = tbq4.HEAD_DIMS[seed % 3], DTYPES[seed // 3 % 3]
        call = make_call(page_size, head_dim, dtype, seed, pool=pool, padding=seed % 4 == 1)
        if seed % 2:
            call = [x.contiguous() if isinstance(x, Tensor) else x for x in call]
        expected = call[3].clone()
        reference.tbq4_page_offsets_(*call[:3], expected, *call[4:])
        moved = on_gpu(call)
        flashq.tbq4_page_offsets_(*moved)
        assert torch.equal(moved[3].cpu(), expected)


@pytest.mark.cuda
@pytest.mark.contract(9)
def test_values_out_of_range_are_memory_safe_on_cuda() -> None:
    """Clamped or skipped; no byte outside of the opened pages is written."""
    call = on_gpu(make_call(16, 128, torch.float16, 4, pool=True, padding=False))
    for i, values in ((4, [10**6, -3, 50]), (6, [0, -5, 3, 10**7]), (7, [-1, 10**6, 9]), (5, None), (9, None)):
        wild = list(call)
        wild[3] = call[3].clone()
        garbage = torch.tensor(values, device="cuda") if values else torch.full_like(call[i], 2147480000)
        wild[i] = garbage
        flashq.tbq4_page_offsets_(*wild)
        torch.cuda.synchronize()
        owned = set(call[5].flatten().tolist()) if i != 5 else set()
        others = [page for page in range(PAGES) if page not in owned]
        assert torch.equal(wild[3][others], call[3][others])


@pytest.mark.cuda
@pytest.mark.contract(9)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_cu_seqlens_out_of_range_count_as_the_largest_before_them(index_dtype: torch.dtype) -> None:
    """As in attention: the first one is 0 whatever stands there, none is above the number of tokens."""
    g = torch.Generator().manual_seed(0)
    limits, tokens = torch.iinfo(index_dtype), 300
    rows = [
        [0, 30, 20, 45],
        [9, -7, 10**9, 3],
        [limits.min, limits.max, 10, 5],
        [limits.max, 10, 5, 60, 40, limits.min, 70, 301, 2],
        torch.randint(-50, 400, (71,), generator=g).tolist(),
        torch.randint(-500, 150, (301,), generator=g).tolist(),
    ]
    k, opened = randn(tokens, HEADS, 64) + 3, 0
    for row in rows:
        wild = torch.tensor(row, dtype=index_dtype)
        tame = torch.cat([wild[:1] * 0, wild[1:]]).clamp(0, tokens).cummax(0)[0]
        batch = len(row) - 1
        lengths = tame.diff() + torch.randint(0, 40, (batch,), generator=g)
        table = torch.randperm(batch * 22, generator=g).view(batch, 22)
        codes = torch.randint(0, 256, (batch * 22, HEADS, 16, 32), generator=g).to(torch.uint8)
        norms, offsets = randn(batch * 22, HEADS, 16, 1).half(), randn(batch * 22, HEADS, 64).half()
        expected = offsets.clone()
        reference.tbq4_page_offsets_(k, codes, norms, expected, lengths, table, tame)
        got = offsets.cuda()
        flashq.tbq4_page_offsets_(
            *(x.cuda() for x in (k, codes, norms)), got, lengths.cuda(), table.cuda(), wild.cuda()
        )
        assert torch.equal(got.cpu(), expected)
        opened += int((expected != offsets).any(-1).any(-1).sum())
    assert opened > 40
