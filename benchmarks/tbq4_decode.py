"""The rows of `python -m benchmarks tbq4`: attention over a 4-bit cache on a GPU, beside 16-bit caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashq
from benchmarks import gpu_peers
from benchmarks.gpu import GpuSetup
from benchmarks.measure import Case
from flashq import tbq4
from flashq.cli.timing import Call

PAGE_SIZE = 64
DTYPE = torch.bfloat16
MOST_BYTES = 16e9  # of the 16-bit contenders of a row


class Shape(NamedTuple):
    """Sequences of `tokens` cached tokens each, or of other lengths up to that."""

    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    q_len: int = 1
    page_size: int = PAGE_SIZE
    offsets: bool = False
    exact: bool = False
    ragged: bool = False

    @property
    def is_continuation(self) -> bool:
        """Whether arithmetic, not the read of the cache, takes the time."""
        return self.q_len > 16

    def name(self) -> str:
        more = f" q{self.q_len}" * (self.q_len > 1) + f" pages of {self.page_size}" * (self.page_size != PAGE_SIZE)
        more += " offsets" * self.offsets + " 4 + 64 exact" * self.exact + " ragged" * self.ragged
        return f"B{self.batch} heads {self.q_heads}/{self.kv_heads} {self.tokens} D{self.head_dim}{more}"


SHAPES = (
    Shape(1, 24, 4, 262144, 256),
    Shape(16, 32, 8, 16384, 128),
    Shape(8, 24, 4, 32768, 256),
    Shape(1, 32, 8, 131072, 128),
    Shape(64, 32, 8, 4096, 128),
    Shape(64, 64, 8, 8192, 128),
    Shape(64, 32, 32, 4096, 128),
    Shape(4, 64, 4, 65536, 128),
    Shape(64, 9, 3, 8192, 64),
    Shape(1, 32, 8, 4096, 128),
    Shape(1, 32, 8, 1024, 128),
    Shape(64, 32, 8, 32768, 128, ragged=True),
    Shape(64, 32, 8, 32768, 128, ragged=True, page_size=16),
    Shape(1, 24, 4, 262144, 256, offsets=True, exact=True),
    Shape(16, 32, 8, 32768, 128),
    Shape(16, 32, 8, 32768, 128, offsets=True, exact=True),
    Shape(16, 32, 8, 16384, 128, q_len=2),
    Shape(16, 32, 8, 16384, 128, q_len=4),
    Shape(1, 32, 8, 33280, 128, q_len=512),
    Shape(1, 32, 8, 36864, 128, q_len=4096),
    Shape(1, 32, 8, 33280, 128, q_len=512, offsets=True, exact=True),
    Shape(1, 24, 4, 33280, 256, q_len=512),
    Shape(1, 9, 3, 33280, 64, q_len=512),
)


def lengths(shape: Shape) -> Tensor:
    """int32 (B) on the CPU. Ragged: log-uniform from 1 on."""
    if not shape.ragged:
        return torch.full((shape.batch,), shape.tokens, dtype=torch.int32)
    exponents = torch.rand(shape.batch, generator=torch.Generator().manual_seed(1))
    return (float(shape.tokens) ** exponents).int()


def _read_bytes(shape: Shape, bits: int) -> float:
    """K and V of all tokens, once."""
    value_bytes = bits / 8 + (2 / tbq4.block_width(shape.head_dim) if bits == 4 else 0)
    return 2.0 * float(lengths(shape).sum()) * shape.kv_heads * shape.head_dim * value_bytes


def _table(shape: Shape, generator: torch.Generator) -> tuple[int, Tensor]:
    """How many pages there are, and int32 (B, max_pages): pages in no order; -1 past a length."""
    needed = -(-lengths(shape) // shape.page_size)
    pages = int(needed.sum())
    order = torch.randperm(pages, generator=generator, device="cuda", dtype=torch.int32)
    table = torch.full((shape.batch, int(needed.max())), -1, device="cuda", dtype=torch.int32)
    begin = 0
    for sequence, count in enumerate(needed.tolist()):
        table[sequence, :count] = order[begin : begin + count]
        begin += count
    return pages, table


def _exact_pool(shape: Shape, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Pages for the first and the last tokens of every sequence."""
    kept = torch.full((shape.batch, shape.tokens // shape.page_size), -1, device="cuda", dtype=torch.int32)
    recent = -(-(64 + shape.q_len) // shape.page_size) + 1
    pool = torch.arange((1 + recent) * shape.batch, device="cuda", dtype=torch.int32).view(shape.batch, -1)
    kept[:, :1], kept[:, -recent:] = pool[:, :1], pool[:, 1:]
    rows = [random(pool.numel(), shape.page_size, shape.kv_heads, shape.head_dim) for _ in "kv"]
    return {"exact_k": rows[0], "exact_v": rows[1], "exact_block_table": kept, "exact_first": 4, "exact_last": 64}


def _random_planes(shape: Shape, pages: int, generator: torch.Generator) -> list[Tensor]:
    """Codes and norms of K, then of V."""
    planes, width = [], tbq4.block_width(shape.head_dim)
    for _ in "kv":
        size = (pages, shape.kv_heads, shape.page_size)
        codes = torch.randint(256, (*size, shape.head_dim // 2), device="cuda", generator=generator, dtype=torch.uint8)
        norms = torch.rand(*size, shape.head_dim // width, device="cuda", generator=generator) + 0.5
        planes += [codes, (norms * width**0.5).half()]
    return planes


def _contenders(shape: Shape, index: int) -> dict[str, Call]:
    generator = torch.Generator("cuda").manual_seed(index)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator, dtype=DTYPE)

    pages, table = _table(shape, generator)
    dim, planes = shape.head_dim, _random_planes(shape, pages, generator)
    q, seqlens = random(shape.batch, shape.q_len, shape.q_heads, dim), lengths(shape).cuda()
    options: dict[str, Any] = {}
    if shape.offsets:
        options["k_offsets"] = random(pages, shape.kv_heads, dim).half()
    if shape.exact:
        options |= _exact_pool(shape, random)
    calls: dict[str, Call] = {
        "flashq": lambda: torch.ops.flashq.tbq4_attention(q, *planes, seqlens, table, **options),
    }
    if _read_bytes(shape, 16) > MOST_BYTES:
        return calls
    caches = [random(pages, shape.page_size, shape.kv_heads, dim) for _ in "kv"]
    calls["flashq decode bf16"] = lambda: torch.ops.flashq.decode(q, *caches, seqlens, table)

    def dequantize() -> list[Tensor]:
        return [
            flashq.tbq4_dequantize(codes, norms, dtype=DTYPE).transpose(1, 2)
            for codes, norms in (planes[:2], planes[2:])
        ]

    def dequantize_first() -> Tensor:
        return torch.ops.flashq.decode(q, *dequantize(), seqlens, table)[0]

    calls["tbq4_dequantize alone"] = dequantize
    calls["tbq4_dequantize, then decode bf16"] = dequantize_first
    if shape.ragged or shape.q_len > 1:
        return calls
    k, v = (x.view(shape.batch, shape.tokens, shape.kv_heads, dim) for x in caches)  # pages in order: no table
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)

    calls["cuDNN bf16"] = cudnn
    return calls | gpu_peers.fa3_calls(
        (q, k, v), lambda fa3, *qkv: fa3.flash_attn_with_kvcache(*qkv, cache_seqlens=seqlens), f"{gpu_peers.FA3} bf16"
    )


def _prepare(shape: Shape) -> GpuSetup:
    read = _read_bytes(shape, 4)
    if shape.is_continuation:
        position = torch.arange(shape.tokens - shape.q_len, shape.tokens)
        work = 4.0 * shape.batch * shape.head_dim * shape.q_heads * int((position + 1).sum())
        return GpuSetup(partial(_contenders, shape), work, read, "matmul")
    return GpuSetup(partial(_contenders, shape), read, read, "read")


# --- a decode step of all layers --------------------------------------------------------------------------------------

STEP_SHAPE, STEP_LAYERS = Shape(1, 24, 4, 262144, 256), 16


def _step_contenders(shape: Shape, layers: int, index: int) -> dict[str, Call]:
    """A token of every sequence through the layers; and the parts of that, whose times should add up to it."""
    generator = torch.Generator("cuda").manual_seed(index)
    ops, dim = torch.ops.flashq, shape.head_dim
    pages, table = _table(shape, generator)
    planes = [_random_planes(shape, pages, generator) for _ in range(layers)]
    rows = []
    for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads):
        size = (layers, shape.batch, heads, dim)
        rows.append(torch.randn(*size, device="cuda", generator=generator, dtype=DTYPE).unbind())
    seqlens = lengths(shape).cuda()
    positions = seqlens - 1
    page = table.gather(1, (positions // shape.page_size).long()[:, None])[:, 0]
    slots = page * shape.page_size + positions % shape.page_size
    angle = torch.rand(shape.tokens, dim // 2, device="cuda", generator=generator) * 6.28
    cos, sin = angle.cos(), angle.sin()

    def append(layer: int) -> Tensor:
        q, k, v = (x[layer] for x in rows)
        return ops.tbq4_rope_append_(q, k, v, cos, sin, positions, *planes[layer], slots)

    def attend(layer: int, q: Tensor) -> Tensor:
        return ops.tbq4_attention(q[:, None], *planes[layer], seqlens, table)[0]

    return {
        "flashq": lambda: [attend(layer, append(layer)) for layer in range(layers)],
        "attention of all layers": lambda: [attend(layer, rows[0][layer]) for layer in range(layers)],
        "rotary embedding and append of all layers": lambda: [append(layer) for layer in range(layers)],
    }


def _prepare_step(shape: Shape, layers: int) -> GpuSetup:
    work = layers * _read_bytes(shape, 4)
    return GpuSetup(partial(_step_contenders, shape, layers), work, work, "read")


def cases(quick: bool = False) -> list[Case[GpuSetup]]:
    """Every row, in the order of the report."""
    shapes = SHAPES
    if quick:
        small = [x._replace(batch=min(x.batch, 2), tokens=min(x.tokens, 1024), q_len=min(x.q_len, 64)) for x in SHAPES]
        shapes = tuple(dict.fromkeys(small))
    suites = (("tbq4", "GB/s"), ("tbq4 continuation", "TFLOP/s"))
    named = [(*suites[x.is_continuation], x) for x in shapes]
    rows = [Case(suite, x.name(), unit, partial(_prepare, x)) for suite, unit, x in named]
    step, layers = (STEP_SHAPE._replace(tokens=1024), 2) if quick else (STEP_SHAPE, STEP_LAYERS)
    name = f"a step of {layers} layers: rotary embedding, append, attention {step.name()}"
    return [*rows, Case("tbq4", name, "GB/s", partial(_prepare_step, step, layers))]
