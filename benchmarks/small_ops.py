"""The rows of `python -m benchmarks cuda`: everything around attention, beside copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

import flashq
from benchmarks import gpu_probes
from benchmarks.gpu import GpuSetup
from benchmarks.gpu_graphs import input_sets, random_normal, random_permutation
from benchmarks.measure import Case
from flashq import tbq4
from flashq.cli.timing import Call

PAGE_SIZE = 64
HEADS = 8
COPY = "torch copy_ of as many bytes"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _copy_of(work: float) -> Call:
    """Reads and writes `work` bytes in all."""
    source = torch.randint(0, 256, (round(work) // 32 * 16,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _setup(own: Callable[[int], Mapping[str, Call]], work: float) -> GpuSetup:
    """The contenders of `own` beside a copy, with the copy rate as ceiling."""
    return GpuSetup(lambda index: {**own(index), COPY: _copy_of(work)}, work, work, "copy")


# --- launches ---------------------------------------------------------------------------------------------------------


def overhead_cases() -> Iterator[Case[GpuSetup]]:
    """What remains of any row when the kernel has nothing to do."""
    setup = GpuSetup(lambda index: {"empty": gpu_probes.launch_empty}, 1.0, 0.0, on_host=False)
    yield Case("overhead", "empty kernel", "launches/s", lambda: setup)


# --- TBQ4 codec -------------------------------------------------------------------------------------------------------


def _plane_bytes(head_dim: int) -> int:
    """Codes and norms of one row."""
    return head_dim // 2 + 2 * head_dim // tbq4.block_width(head_dim)


def _prepare_codec(op: str, dtype: torch.dtype, tokens: int, heads: int, head_dim: int) -> GpuSetup:
    def contenders(index: int) -> dict[str, Call]:
        x = random_normal(tokens, heads, head_dim, dtype=dtype, seed=index)
        if op == "tbq4_dequantize":
            codes, norms = torch.ops.flashq.tbq4_quantize(x)
            return {"flashq": lambda: torch.ops.flashq.tbq4_dequantize(codes, norms, dtype=dtype)}
        return {"flashq": lambda: getattr(torch.ops.flashq, op)(x)}

    row_bytes = head_dim * dtype.itemsize
    other_bytes = row_bytes if op == "tbq4_rotate" else _plane_bytes(head_dim)
    return _setup(contenders, tokens * heads * (row_bytes + other_bytes))


def codec_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    large = 256 if quick else 8192  # of keys; with as many values, twice
    shapes = [(dtype, tokens, 128) for dtype in (BF16, FP16, FP32) for tokens in (large, 2 * large)]
    shapes += [(BF16, large, 64), (BF16, large, 256)]
    for op in ("tbq4_quantize", "tbq4_dequantize", "tbq4_rotate"):
        for dtype, tokens, head_dim in [*shapes, (BF16, 64, 128)]:
            name = f"{op} {NAMES[dtype]} {tokens} tokens heads {HEADS} D{head_dim}"
            yield Case("codec", name, "GB/s", partial(_prepare_codec, op, dtype, tokens, HEADS, head_dim))


# --- appends ----------------------------------------------------------------------------------------------------------


def _slots(sets: int, tokens: int, step: bool) -> Tensor:
    """int64 (sets, tokens), all different. A step's tokens lie anywhere; others fill pages, which lie anywhere."""
    pages = -(-sets * tokens // PAGE_SIZE)
    if step:
        slots = random_permutation(pages * PAGE_SIZE)
    else:
        slots = torch.arange(pages * PAGE_SIZE, device="cuda").view(pages, PAGE_SIZE)
        slots = slots[random_permutation(pages)].flatten()
    return slots[: sets * tokens].view(sets, tokens)


def _prepare_append(op: str, dtype: torch.dtype, tokens: int, head_dim: int, step: bool, offsets: bool) -> GpuSetup:
    """K and V of `tokens` tokens go into one cache; every input set has slots of its own."""
    row_bytes = head_dim * dtype.itemsize
    written = row_bytes if op == "kv_append_" else _plane_bytes(head_dim)
    work = tokens * (2.0 * HEADS * (row_bytes + written) + 8)
    if offsets:
        work += (tokens if step else tokens // PAGE_SIZE) * HEADS * head_dim * 2.0
    slots = _slots(input_sets(work), tokens, step)
    pages = -(-slots.numel() // PAGE_SIZE)
    if op == "kv_append_":
        planes = [random_normal(pages, PAGE_SIZE, HEADS, head_dim, dtype=dtype, seed=seed) for seed in (0, 1)]
    else:
        blocks = head_dim // tbq4.block_width(head_dim)
        planes = []
        for _ in "kv":
            planes.append(torch.zeros(pages, HEADS, PAGE_SIZE, head_dim // 2, device="cuda", dtype=torch.uint8))
            planes.append(torch.zeros(pages, HEADS, PAGE_SIZE, blocks, device="cuda", dtype=FP16))
    page_offsets = random_normal(pages, HEADS, head_dim, dtype=FP16, seed=2) if offsets else None

    def contenders(index: int) -> dict[str, Call]:
        k, v = (random_normal(tokens, HEADS, head_dim, dtype=dtype, seed=3 * index + part) for part in range(2))
        if op == "tbq4_append_":
            return {"flashq": lambda: torch.ops.flashq.tbq4_append_(k, v, *planes, slots[index], page_offsets)}
        rows = [plane.view(-1, HEADS, head_dim) for plane in planes]
        return {
            "flashq": lambda: torch.ops.flashq.kv_append_(k, v, *planes, slots[index]),
            "torch index_copy_": lambda: [
                to.index_copy_(0, slots[index], new) for to, new in zip(rows, (k, v), strict=True)
            ],
        }

    return _setup(contenders, work)


def append_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    """A prompt, and a step: one token of each of 64 sequences."""
    prompt = 256 if quick else 8192
    plain = [(BF16, 128), (FP16, 128), (FP32, 128), (BF16, 64), (BF16, 256)]
    rows = [(op, *shape, step, False) for op in ("kv_append_", "tbq4_append_") for shape in plain for step in (0, 1)]
    rows += [("tbq4_append_", BF16, 128, step, True) for step in (0, 1)]
    for op, dtype, head_dim, step, offsets in rows:
        tokens = "64 sequences 1 token" if step else f"{prompt} tokens"
        name = f"{op} {NAMES[dtype]} {tokens} heads {HEADS} D{head_dim}" + offsets * " offsets"
        prepare = partial(_prepare_append, op, dtype, 64 if step else prompt, head_dim, bool(step), offsets)
        yield Case("append", name, "GB/s", prepare)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as models have it, every operation in x's dtype: x (T, H, D), cos and sin (T, 1, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def _prepare_rope_append(tokens: int, q_heads: int, kv_heads: int, head_dim: int, step: bool, exact: bool) -> GpuSetup:
    """`tokens` tokens, in a step of as many sequences; with page offsets and an exact pool, or with neither."""
    row_bytes = 2 * head_dim
    written = q_heads * row_bytes + 2 * kv_heads * _plane_bytes(head_dim)
    if exact:
        written += 3 * kv_heads * row_bytes  # the pool is written, an offset read
    work = tokens * ((q_heads + 2.0 * kv_heads) * row_bytes + written + 4 * head_dim + 16 + 8 * exact)
    footprint = max(work, 1e6)  # thousands of sets of one token would take longer to make than to measure
    slots = _slots(input_sets(footprint), tokens, step)
    pages = -(-slots.numel() // PAGE_SIZE)
    blocks = head_dim // tbq4.block_width(head_dim)
    planes = []
    for _ in "kv":
        planes.append(torch.zeros(pages, kv_heads, PAGE_SIZE, head_dim // 2, device="cuda", dtype=torch.uint8))
        planes.append(torch.zeros(pages, kv_heads, PAGE_SIZE, blocks, device="cuda", dtype=FP16))
    offsets, pool = None, []
    if exact:
        offsets = random_normal(pages, kv_heads, head_dim, dtype=FP16, seed=2)
        pool = [torch.zeros(pages, PAGE_SIZE, kv_heads, head_dim, device="cuda", dtype=BF16) for _ in "kv"]
    frequency = 1e4 ** -torch.arange(0, 1, 2 / head_dim, device="cuda")
    angle = torch.arange(8192, device="cuda")[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def contenders(index: int) -> dict[str, Call]:
        q, k, v = (
            random_normal(tokens, heads, head_dim, dtype=BF16, seed=3 * index + part)
            for part, heads in enumerate((q_heads, kv_heads, kv_heads))
        )
        positions, ops = random_permutation(8192)[:tokens], torch.ops.flashq
        own = (*pool, slots[index]) if exact else ()
        full = [torch.cat((x, x), dim=-1)[positions, None].to(BF16) for x in (cos, sin)]  # once for all layers

        def separate() -> tuple[Tensor, Tensor]:
            turned = _turn(q, *full), _turn(k, *full)
            ops.tbq4_append_(turned[1], v, *planes, slots[index], offsets)
            if exact:
                ops.kv_append_(turned[1], v, *pool, slots[index])
            return turned

        def only_append() -> None:
            ops.tbq4_append_(k, v, *planes, slots[index], offsets)

        return {
            "flashq": lambda: ops.tbq4_rope_append_(q, k, v, cos, sin, positions, *planes, slots[index], offsets, *own),
            "rotary embedding in torch, then the appends": separate,
            "tbq4_append_ alone": only_append,
        }

    return GpuSetup(contenders, work, footprint, "copy")


def rope_append_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    """Decode steps, and a prompt."""
    prompt = 256 if quick else 8192
    for tokens, q_heads, kv_heads, head_dim in (
        (1, 32, 8, 128),
        (64, 32, 8, 128),
        (1, 24, 4, 256),
        (prompt, 32, 8, 128),
    ):
        for exact in (False, True):
            step = tokens != prompt
            new = f"{tokens} sequences 1 token" if step else f"{tokens} tokens"
            name = f"tbq4_rope_append_ bf16 {new} heads {q_heads}/{kv_heads} D{head_dim}"
            prepare = partial(_prepare_rope_append, tokens, q_heads, kv_heads, head_dim, step, exact)
            yield Case("append", name + exact * " offsets exact pool", "GB/s", prepare)


# --- page offsets -----------------------------------------------------------------------------------------------------


def _prepare_page_offsets(sequences: int, tokens: int, earlier: int, head_dim: int) -> GpuSetup:
    """Each of `sequences` gets `tokens` new keys after `earlier` ones in the cache."""
    length = earlier + tokens
    width = -(-length // PAGE_SIZE)
    pages = sequences * width
    opened = width - -(-earlier // PAGE_SIZE)  # pages of each sequence
    decoded = min(earlier, tbq4.OFFSET_WINDOW) if opened and tokens < PAGE_SIZE else 0
    written = 2.0 * head_dim * opened
    read = decoded * _plane_bytes(head_dim) if decoded else opened and tokens * head_dim * 2.0
    work = sequences * (HEADS * (read + written) + 24.0)

    def contenders(index: int) -> dict[str, Call]:
        k = random_normal(sequences * tokens, HEADS, head_dim, dtype=BF16, seed=2 * index)
        codes, norms = torch.ops.flashq.tbq4_quantize(
            random_normal(pages, HEADS, PAGE_SIZE, head_dim, dtype=BF16, seed=2 * index + 1)
        )
        offsets = torch.zeros(pages, HEADS, head_dim, device="cuda", dtype=FP16)
        seqlens = torch.full((sequences,), length, device="cuda")
        table = random_permutation(pages).view(sequences, width)
        ends = torch.arange(sequences + 1, device="cuda") * tokens
        return {
            "flashq": lambda: torch.ops.flashq.tbq4_page_offsets_(k, codes, norms, offsets, seqlens, table, ends),
        }

    return _setup(contenders, work)


def page_offset_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    """A prompt, a step that opens a page of every sequence, and a step that opens none."""
    prompt = 256 if quick else 8192
    for name, call in (
        (f"{prompt} tokens", (1, prompt, 0)),
        ("64 sequences 1 token opening a page", (64, 1, 512)),
        ("64 sequences 1 token opening none", (64, 1, 520)),
    ):
        yield Case(
            "page offsets",
            f"tbq4_page_offsets_ bf16 {name} heads {HEADS} D128",
            "GB/s",
            partial(_prepare_page_offsets, *call, 128),
        )


# --- merge ------------------------------------------------------------------------------------------------------------


def _prepare_merge(dtype: torch.dtype, partials: int, tokens: int, heads: int, head_dim: int) -> GpuSetup:
    def contenders(index: int) -> dict[str, Call]:
        outs = random_normal(partials, tokens, heads, head_dim, dtype=dtype, seed=2 * index)
        lses = random_normal(partials, heads, tokens, dtype=FP32, seed=2 * index + 1)
        return {
            "flashq": lambda: torch.ops.flashq.merge_states(outs, lses),
            "eager": lambda: flashq.reference.merge_states(outs, lses),
        }

    return _setup(contenders, (partials + 1.0) * tokens * heads * (head_dim * dtype.itemsize + 4))


def merge_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    large = 256 if quick else 4096
    for dtype, partials, tokens in (
        (FP32, 8, large),
        (BF16, 8, large),
        (FP16, 8, large),
        (BF16, 2, large),
        (FP32, 8, 64),
    ):
        name = f"merge_states {NAMES[dtype]} {partials} partials {tokens} tokens heads 32 D128"
        yield Case("merge", name, "GB/s", partial(_prepare_merge, dtype, partials, tokens, 32, 128))


def cases(quick: bool = False) -> list[Case[GpuSetup]]:
    """Every row, in the order of the report."""
    return [
        *overhead_cases(),
        *codec_cases(quick),
        *append_cases(quick),
        *rope_append_cases(quick),
        *page_offset_cases(quick),
        *merge_cases(quick),
    ]
