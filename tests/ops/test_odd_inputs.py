"""The small ops on inputs of any strides, any base and any size, against the reference, to the byte."""

from __future__ import annotations

import random
from collections.abc import Sequence

import golden
import pytest
import torch
from cases import DTYPES, move
from torch import Tensor

import flashq
from flashq import reference, tbq4

SEEDS = range(60)
PADS = (0, 0, 1, 3, 8, 16)  # elements between rows, planes, ...


def random_bits(rng: random.Random, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count,), generator=generator, dtype=dtype)
    return (torch.randn(count, generator=generator) * 2.0 ** rng.randint(-8, 8)).to(dtype)


def view(rng: random.Random, shape: Sequence[int], dtype: torch.dtype, *, expand: bool = True) -> Tensor:
    """A CPU tensor with a unit last stride: dimensions in any order in memory, gaps of any size, any base, and, where
    nobody writes, zero strides."""
    *leading, last = shape
    stride = [0] * len(leading)
    extent = last + rng.choice(PADS)
    for d in rng.sample(range(len(leading)), len(leading)):
        if expand and rng.random() < 0.15:
            continue
        stride[d] = extent
        extent = extent * max(leading[d], 1) + rng.choice(PADS)
    offset = rng.choice((0, 0, 1, 2, 8))
    return random_bits(rng, extent + offset + 16, dtype).as_strided(shape, (*stride, 1), offset)


def plane(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Contiguous, at any base."""
    offset, count = rng.choice((0, 0, 1, 2, 4, 7)), torch.Size(shape).numel()
    return random_bits(rng, count + 16, dtype)[offset : offset + count].view(shape)


def index(rng: random.Random, values: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values, next to each other or not."""
    step = rng.choice((1, 1, 2, 5))
    return torch.tensor([x for value in values for x in (value, *[12345] * (step - 1))], dtype=dtype)[::step]


def room_of(x: Tensor) -> Tensor:
    """All memory of a tensor."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def copy_of(x: Tensor, device: torch.device) -> Tensor:
    return room_of(x).to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def same_rooms(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = [
        (room_of(x).cpu().view(torch.uint8), room_of(y).view(torch.uint8)) for x, y in zip(got, expected, strict=True)
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def rows_shape(rng: random.Random) -> list[int]:
    """Leading dimensions of a codec op: few rows, many or none, in up to eight dimensions."""
    kind = rng.random()
    if kind < 0.1:
        return [rng.choice((130, 160)), 131]
    return [rng.choice((0, 1, 1, 2, 3, 5)) if kind < 0.3 else rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 8))]


@pytest.mark.contract(2, 11, 14, 17)
@pytest.mark.parametrize("seed", SEEDS)
def test_codec(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    dtype, head_dim = rng.choice(DTYPES), rng.choice(tbq4.HEAD_DIMS)
    shape = rows_shape(rng)
    x = view(rng, (*shape, head_dim), dtype)
    for got, truth in zip(flashq.tbq4_quantize(move(x, device)), reference.tbq4_quantize(x), strict=True):
        assert golden.same_bits(got.cpu(), truth)
    for inverse in (False, True):
        got = flashq.tbq4_rotate(move(x, device), inverse=inverse)
        assert golden.same_bits(got.cpu(), reference.tbq4_rotate(x, inverse=inverse).to(dtype))
        assert got.shape == x.shape
        assert got.is_contiguous()
    codes = view(rng, (*shape, head_dim // 2), torch.uint8)
    norms = view(rng, (*shape, head_dim // tbq4.block_width(head_dim)), torch.float16)
    got = flashq.tbq4_dequantize(move(codes, device), move(norms, device), dtype=dtype)
    assert golden.same_bits(got.cpu(), reference.tbq4_dequantize(codes, norms).to(dtype))


def some_slots(rng: random.Random, tokens: int, capacity: int, dtype: torch.dtype) -> list[int]:
    """Different slots; some negative, some past the cache."""
    slots = rng.sample(range(max(capacity, tokens)), tokens)
    limits = torch.iinfo(dtype)
    wrong = (-1, limits.min, limits.max, capacity, capacity + 1)
    return [rng.choice(wrong) if rng.random() < 0.2 or slot >= capacity else slot for slot in slots]


def skip_wrong(slots: Tensor, capacity: int) -> Tensor:
    """What the CPU and the reference accept."""
    return torch.where(slots < capacity, slots, -1)


def given(slots: Tensor, capacity: int, device: torch.device) -> Tensor:
    return skip_wrong(slots, capacity) if device.type == "cpu" else move(slots, device)


@pytest.mark.contract(2, 9, 14)
@pytest.mark.parametrize("seed", SEEDS)
def test_kv_append(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    dtype, index_dtype = rng.choice(DTYPES), rng.choice((torch.int32, torch.int64))
    pages, page_size, heads = rng.choice((0, 1, 2, 7)), rng.choice((0, 1, 3, 16)), rng.choice((1, 2, 3, 200))
    head_dim, tokens = rng.choice((0, 1, 2, 3, 8, 24, 64, 128, 130, 256)), rng.choice((0, 1, 2, 19, 40))
    k, v = (view(rng, (tokens, heads, head_dim), dtype) for _ in "kv")
    caches = [view(rng, (pages, page_size, heads, head_dim), dtype, expand=False) for _ in "kv"]
    slots = index(rng, some_slots(rng, tokens, pages * page_size, index_dtype), index_dtype)
    got = [copy_of(x, device) for x in caches]
    flashq.kv_append_(move(k, device), move(v, device), *got, given(slots, pages * page_size, device))
    reference.kv_append_(k, v, *caches, skip_wrong(slots, pages * page_size))
    assert same_rooms(got, caches)


@pytest.mark.contract(2, 9, 14, 17)
@pytest.mark.parametrize("seed", SEEDS)
def test_tbq4_append(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    dtype, index_dtype = rng.choice(DTYPES), rng.choice((torch.int32, torch.int64))
    head_dim, heads, page_size = rng.choice(tbq4.HEAD_DIMS), rng.choice((1, 2, 3)), rng.choice((0, 1, 3, 16, 48))
    tokens = rng.choice((0, 1, 2, 19, 40)) if rng.random() < 0.9 else 17000 // heads
    pages = rng.choice((0, 1, 9)) if tokens < 100 else tokens // max(page_size, 1) + 1
    k, v = (view(rng, (tokens, heads, head_dim), dtype) for _ in "kv")
    shapes = [(pages, heads, page_size, n) for n in (head_dim // 2, head_dim // tbq4.block_width(head_dim))]
    planes = [plane(rng, shape, x) for _ in "kv" for shape, x in zip(shapes, (torch.uint8, torch.float16), strict=True)]
    offsets = view(rng, (pages, heads, head_dim), torch.float16) if rng.random() < 0.5 else None
    slots = index(rng, some_slots(rng, tokens, pages * page_size, index_dtype), index_dtype)
    got = [copy_of(x, device) for x in planes]
    more = (given(slots, pages * page_size, device), move(offsets, device))
    flashq.tbq4_append_(move(k, device), move(v, device), *got, *more)
    reference.tbq4_append_(k, v, *planes, skip_wrong(slots, pages * page_size), offsets)
    assert same_rooms(got, planes)


@pytest.mark.contract(2, 9, 14, 17)
@pytest.mark.parametrize("seed", SEEDS)
def test_tbq4_rope_append(seed: int, device: torch.device) -> None:
    """Tables and rotary dims of any size, a pool or none; half of the calls fit vectors."""
    rng = random.Random(seed)
    plain = rng.random() < 0.5

    def make(shape: Sequence[int], dtype: torch.dtype, *, written: bool = False) -> Tensor:
        if plain:
            return random_bits(rng, torch.Size(shape).numel(), dtype).view(shape)
        return view(rng, shape, dtype, expand=not written)

    dtype, head_dim = rng.choice(DTYPES), rng.choice(tbq4.HEAD_DIMS)
    tokens, q_heads, kv_heads = rng.choice((0, 1, 2, 19, 40)), rng.choice((0, 1, 5)), rng.choice((0, 1, 2, 3))
    pages, page_size, exact_page_size = rng.choice((0, 1, 9)), rng.choice((0, 1, 3, 16, 48)), rng.choice((0, 1, 16))
    rows, pairs = rng.choice((1, 7, 1000)), rng.choice((1, 3, 8, 12, head_dim // 4, head_dim // 2))
    indices = [rng.choice((torch.int32, torch.int64)) for _ in range(3)]
    q, k, v = (make((tokens, heads, head_dim), dtype) for heads in (q_heads, kv_heads, kv_heads))
    table_dtype = rng.choice((torch.float32, dtype))
    tables = [make((rows, pairs), table_dtype) for _ in range(2)]
    positions = index(rng, [rng.randrange(rows) for _ in range(tokens)], indices[0])
    planes = []
    for _ in "kv":
        for last, x in ((head_dim // 2, torch.uint8), (head_dim // tbq4.block_width(head_dim), torch.float16)):
            planes.append(plane(rng, (pages, kv_heads, page_size, last), x))
    slots = index(rng, some_slots(rng, tokens, pages * page_size, indices[1]), indices[1])
    offsets = make((pages, kv_heads, head_dim), torch.float16) if rng.random() < 0.5 else None
    pools, exact_slots = [], None
    if rng.random() < 0.7:
        pools = [make((5, exact_page_size, kv_heads, head_dim), dtype, written=True) for _ in "kv"]
        exact_slots = index(rng, some_slots(rng, tokens, 5 * exact_page_size, indices[2]), indices[2])
    options = {"interleaved": rng.random() < 0.5}
    got = [copy_of(x, device) for x in (*planes, *pools)]
    exact = [*got[4:], given(exact_slots, 5 * exact_page_size, device)] if pools else []
    turned = flashq.tbq4_rope_append_(
        *(move(x, device) for x in (q, k, v, *tables, positions)), *got[:4],
        given(slots, pages * page_size, device), move(offsets, device), *exact, **options,
    )  # fmt: skip
    exact = [*pools, skip_wrong(exact_slots, 5 * exact_page_size)] if pools else []
    truth = reference.tbq4_rope_append_(
        q, k, v, *tables, positions, *planes, skip_wrong(slots, pages * page_size), offsets, *exact, **options
    )
    assert golden.same_bits(turned.cpu(), truth)
    assert same_rooms(got, [*planes, *pools])


@pytest.mark.contract(2, 9, 17)
@pytest.mark.parametrize("seed", SEEDS)
def test_tbq4_page_offsets(seed: int, device: torch.device) -> None:
    """Heads and sequences of any number, tables with pages that do not exist."""
    rng = random.Random(seed)
    dtype, head_dim = rng.choice(DTYPES), rng.choice(tbq4.HEAD_DIMS)
    heads, page_size, batch = rng.choice((1, 2, 5)), rng.choice((1, 3, 16, 64)), rng.choice((1, 2, 3, 40))
    width, pages = 7, 7 * batch + 2
    lengths = [rng.randint(0, width * page_size) for _ in range(batch)]
    added = [rng.randint(0, length) if rng.random() < 0.7 else min(1, length) for length in lengths]
    ends = [sum(added[:b]) for b in range(batch + 1)]
    k = view(rng, (sum(added) + rng.choice((0, 3)), heads, head_dim), dtype)
    codes = plane(rng, (pages, heads, page_size, head_dim // 2), torch.uint8)
    norms = plane(rng, (pages, heads, page_size, head_dim // tbq4.block_width(head_dim)), torch.float16)
    offsets = view(rng, (pages, heads, head_dim), torch.float16, expand=False)
    order = rng.sample(range(pages), batch * width)
    table = [
        page if rng.random() < 0.9 or device.type == "cpu" else rng.choice((-1, pages, 2**31 - 1)) for page in order
    ]
    tables = torch.tensor(table, dtype=rng.choice((torch.int32, torch.int64))).view(batch, width)
    if rng.random() < 0.5:
        tables = tables.t().contiguous().t()
    starts = index(rng, [rng.randint(0, n) for n in lengths], torch.int32) if rng.random() < 0.5 else None
    more: list[Tensor | None] = [None, None]
    if rng.random() < 0.5:
        pool = torch.tensor([rng.randint(-2, 7) for _ in range(9 * batch)]).view(batch, 9)
        more = [view(rng, (6, 8, heads, head_dim), dtype), pool]
    arguments = [index(rng, lengths, torch.int64), tables, index(rng, ends, torch.int32), starts, *more]
    got = copy_of(offsets, device)
    flashq.tbq4_page_offsets_(*(move(x, device) for x in (k, codes, norms)), got, *(move(x, device) for x in arguments))
    # The reference gets one page more, which stands for those that do not exist.
    arguments[1] = torch.where((tables < 0) | (tables >= pages), pages, tables)
    expected = torch.cat([offsets, offsets[:1]])
    reference.tbq4_page_offsets_(k, codes, norms, expected, *arguments)
    offsets.copy_(expected[:pages])
    assert same_rooms([got], [offsets])


@pytest.mark.contract(2, 3, 10, 14)
@pytest.mark.parametrize("seed", SEEDS)
def test_merge_states(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    dtype, batched = rng.choice(DTYPES), rng.random() < 0.5
    count, head_dim = rng.choice((0, 1, 2, 3, 8)), rng.choice((0, 1, 3, 8, 40, 72, 128, 130, 520, 1000, 4096))
    batch, tokens, heads = (rng.choice((0, 1, 2, 3, 9)) for _ in range(3))
    middle = (batch,) if batched else ()
    outs = view(rng, (count, *middle, tokens, heads, head_dim), dtype)
    lses = view(rng, (count, *middle, heads, tokens), torch.float32)
    if rng.random() < 0.5:
        lses = lses.transpose(-1, -2).contiguous().transpose(-1, -2)
    out, lse = (x.cpu() for x in flashq.merge_states(move(outs, device), move(lses, device)))
    truth, true_lse = reference.merge_states(outs, lses, dtype=torch.float64)
    scale = outs.abs().max().item() if outs.numel() else 0.0
    torch.testing.assert_close(out.double(), truth, rtol=torch.finfo(dtype).eps, atol=2e-6 * scale, check_dtype=False)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=2e-6)
