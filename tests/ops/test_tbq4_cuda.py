"""The TBQ4 codec and its append on CUDA: the CPU's bytes on any input, whatever the kernel."""

from __future__ import annotations

import golden
import pytest
import torch
from accuracy import using_threads
from cases import DTYPES

import flashq
from flashq import reference, tbq4

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def mixed_rows(count: int, head_dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows on CUDA: scales over the whole range of fp32, outliers, sparse rows and integers (ties and zeros)."""
    random = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(count, head_dim, generator=random, device=CUDA)
    kind = torch.randint(0, 8, (count, 1), generator=random, device=CUDA)
    scale = torch.exp2(torch.empty(count, 1, device=CUDA).uniform_(-40, 20, generator=random))
    scale = torch.where(kind == 1, torch.exp2(torch.empty_like(scale).uniform_(-149, 127, generator=random)), scale)
    few = torch.rand(count, head_dim, generator=random, device=CUDA) < 0.04
    x = torch.where((kind == 2) & few, 30 * x, x)
    x = torch.where((kind == 3) & ~few, 0.0, x)
    x = torch.where(kind == 4, (4 * x).round(), x)
    x = torch.where(kind == 5, x.sign(), x)
    return torch.where((kind == 4) | (kind == 5), x, x * scale).to(dtype)


@pytest.mark.slow
@pytest.mark.contract(17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_ten_million_vectors_get_the_cpus_bytes(head_dim: int, dtype: torch.dtype) -> None:
    """The CPU's bytes are tested against the reference; the first rows here are compared with it as well."""
    rows = 1 << 20
    with using_threads(torch.multiprocessing.cpu_count()):
        for seed in range(10):
            x = mixed_rows(rows, head_dim, dtype, seed)
            codes, norms = flashq.tbq4_quantize(x)
            true_codes, true_norms = flashq.tbq4_quantize(x.cpu())
            assert torch.equal(codes.cpu(), true_codes)
            assert same_bytes(norms, true_norms)
            if seed == 0:
                few = reference.tbq4_quantize(x[:4000].cpu())
                assert torch.equal(codes[:4000].cpu(), few[0])
                assert same_bytes(norms[:4000], few[1])
                decoded, rotated = flashq.tbq4_dequantize(codes, norms, dtype=dtype), flashq.tbq4_rotate(x)
                assert golden.same_bits(decoded.cpu(), flashq.tbq4_dequantize(true_codes, true_norms, dtype=dtype))
                assert golden.same_bits(rotated.cpu(), flashq.tbq4_rotate(x.cpu()))


@pytest.mark.contract(17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 31, 33, 4099, 70000])
def test_every_number_of_rows(rows: int, head_dim: int, dtype: torch.dtype) -> None:
    """Few rows and many take different kernels; none may touch what lies behind the last row."""
    x = mixed_rows(rows, head_dim, dtype, seed=rows)
    codes, norms = flashq.tbq4_quantize(x)
    true_codes, true_norms = flashq.tbq4_quantize(x.cpu())
    assert torch.equal(codes.cpu(), true_codes)
    assert same_bytes(norms, true_norms)
    for out_dtype in DTYPES:
        decoded = flashq.tbq4_dequantize(codes, norms, dtype=out_dtype)
        assert golden.same_bits(decoded.cpu(), flashq.tbq4_dequantize(true_codes, true_norms, dtype=out_dtype))
    for inverse in (False, True):
        rotated = flashq.tbq4_rotate(x, inverse=inverse)
        assert golden.same_bits(rotated.cpu(), flashq.tbq4_rotate(x.cpu(), inverse=inverse))


@pytest.mark.contract(17)
@pytest.mark.parametrize("group", golden.CODEC_GROUPS)
def test_golden_vectors_among_many(group: str) -> None:
    """The kernels for many rows get the traps, too: edges, ties, rounding. All rows are traps, or a tenth of them."""
    data = golden.load(group)
    random = torch.Generator().manual_seed(0)
    order = torch.randint(0, len(data["x"]), (9001,), generator=random)
    for traps in (torch.ones(len(order), dtype=torch.bool), torch.rand(len(order), generator=random) < 0.1):
        x = data["x"][order]
        x[~traps] = torch.randn(int((~traps).sum()), x.shape[1], generator=random).to(x.dtype)
        codes, norms = flashq.tbq4_quantize(x.to(CUDA))
        assert torch.equal(codes.cpu()[traps], data["codes"][order[traps]])
        assert same_bytes(norms.cpu()[traps], data["norms"][order[traps]])


@pytest.mark.contract(7, 17)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_decode_takes_any_norm(head_dim: int) -> None:
    """All 65,536 bit patterns of a norm, NaN, Inf and negative ones included, over random codes."""
    blocks = head_dim // tbq4.block_width(head_dim)
    norms = torch.arange(-(1 << 15), 1 << 15).short().view(torch.float16).repeat(blocks).view(-1, blocks)
    random = torch.Generator().manual_seed(head_dim)
    codes = torch.randint(0, 256, (len(norms), head_dim // 2), generator=random, dtype=torch.uint8)
    for dtype in DTYPES:
        decoded = flashq.tbq4_dequantize(codes.to(CUDA), norms.to(CUDA), dtype=dtype)
        assert golden.same_bits(decoded.cpu(), flashq.tbq4_dequantize(codes, norms, dtype=dtype))


def make_planes(pages: int, heads: int, page_size: int, head_dim: int) -> list[torch.Tensor]:
    """K and V planes on CUDA, full of 255 and NaN."""
    blocks = head_dim // tbq4.block_width(head_dim)
    codes = torch.full((2, pages, heads, page_size, head_dim // 2), 255, dtype=torch.uint8, device=CUDA)
    norms = torch.full((2, pages, heads, page_size, blocks), float("nan"), dtype=torch.float16, device=CUDA)
    return [codes[0], norms[0], codes[1], norms[1]]


@pytest.mark.contract(9, 17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
@pytest.mark.parametrize(("tokens", "page_size"), [(3, 1), (700, 16), (9000, 48)])
def test_append_writes_the_cpus_bytes(tokens: int, page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    heads, pages = 3, -(-tokens // page_size) + 2
    k, v = (mixed_rows(tokens * heads, head_dim, dtype, seed).view(tokens, heads, head_dim) for seed in (1, 2))
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[1::7] = -1
    offsets = torch.randn(pages, heads, head_dim, generator=torch.Generator().manual_seed(1)).half()
    for k_offsets in (None, offsets):
        planes = make_planes(pages, heads, page_size, head_dim)
        expected = [p.cpu() for p in planes]
        given = None if k_offsets is None else k_offsets.to(CUDA)
        flashq.tbq4_append_(k, v, *planes, slots.to(CUDA), given)
        flashq.tbq4_append_(k.cpu(), v.cpu(), *expected, slots, k_offsets)
        assert all(map(same_bytes, planes, expected))


@pytest.mark.contract(9)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [5, 3000])
def test_slots_outside_of_the_cache_are_skipped(tokens: int, index_dtype: torch.dtype, head_dim: int) -> None:
    k = torch.randn(tokens, 2, head_dim, device=CUDA)
    planes = make_planes(tokens, 2, 3, head_dim)
    limits = torch.iinfo(index_dtype)
    bad = [3 * tokens, 3 * tokens + 1, limits.max, limits.min, -1]
    if index_dtype == torch.int64:
        bad += [2**40, 2**62, -(2**40), 2**32, 2**32 + 1]
    slots = torch.tensor(bad, device=CUDA).repeat(tokens)[:tokens].to(index_dtype)
    before = [p.clone() for p in planes]
    flashq.tbq4_append_(k, k, *planes, slots)
    assert all(map(same_bytes, planes, before))
    slots[-1] = 3 * tokens - 1
    flashq.tbq4_append_(k, k, *planes, slots)
    codes, norms = flashq.tbq4_quantize(k[-1])
    assert torch.equal(planes[0][-1, :, -1], codes)
    assert torch.equal(planes[3][-1, :, -1], norms)
    changed = (planes[0] != before[0]).flatten(2).any(-1)
    assert changed.sum() == 2


@pytest.mark.parametrize("op", ["tbq4_quantize", "tbq4_dequantize", "tbq4_rotate", "tbq4_append_"])
def test_opcheck(op: str) -> None:
    x = torch.randn(5, 2, 128, device=CUDA, dtype=torch.float16)
    arguments = {
        "tbq4_quantize": (x,),
        "tbq4_dequantize": tuple(flashq.tbq4_quantize(x)),
        "tbq4_rotate": (x.transpose(0, 1),),
        "tbq4_append_": (x, x, *(p.nan_to_num() for p in make_planes(3, 2, 4, 128)), torch.arange(5, device=CUDA)),
    }[op]
    torch.library.opcheck(getattr(torch.ops.flashq, op).default, arguments)


@pytest.mark.contract(9, 16)
def test_tensors_on_several_devices_are_refused() -> None:
    k = torch.randn(5, 2, 128, device=CUDA)
    planes = make_planes(3, 2, 4, 128)
    slots = torch.arange(5, device=CUDA)
    with pytest.raises(RuntimeError, match=r"flashq::tbq4_append_: slots: expected a tensor on cuda:0, .* got cpu"):
        flashq.tbq4_append_(k, k, *planes, slots.cpu())
    with pytest.raises(RuntimeError, match=r"flashq::tbq4_append_: v_codes: expected a tensor on cuda:0, .* got cpu"):
        flashq.tbq4_append_(k, k, *planes[:2], planes[2].cpu(), planes[3], slots)
    with pytest.raises(RuntimeError, match=r"flashq::tbq4_dequantize: norms: expected a tensor on cuda:0, .* got cpu"):
        flashq.tbq4_dequantize(planes[0], planes[1].cpu())
