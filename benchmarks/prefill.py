"""The rows of `python -m benchmarks prefill`: attention of many queries, beside torch's SDPA and FlashAttention-3.

Causal and windowed calls count visible pairs only. Rows of options stand beside flashq's own plain call, whose seconds
are scaled to the row's work where it does other work, so that ratios are ratios of rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashq
from benchmarks import gpu_peers
from benchmarks.gpu import GpuSetup
from benchmarks.gpu_graphs import random_normal, random_permutation
from benchmarks.measure import Case
from flashq.cli.timing import Call

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
BF16, FP16 = torch.bfloat16, torch.float16
PAGE_SIZE = 64
CAP = 30.0


@dataclass(frozen=True)
class Shape:
    """Sequences of one length."""

    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool = True

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.batch} x {self.tokens} tokens heads {self.q_heads}/{self.kv_heads} D{self.head_dim} {mask}"

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return self.batch * work_of(self, self.tokens, self.tokens, causal=self.causal)

    def inputs(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """q, k and v, random normal."""
        heads = (self.q_heads, self.kv_heads, self.kv_heads)
        return [
            random_normal(self.batch, self.tokens, count, self.head_dim, dtype=dtype, seed=3 * seed + part)
            for part, count in enumerate(heads)
        ]

    @property
    def footprint(self) -> float:
        """Bytes of q, k, v and out in 16 bits."""
        return 4.0 * self.batch * self.tokens * self.head_dim * (self.q_heads + self.kv_heads)


def work_of(shape: Shape, q_len: int, kv_len: int, *, causal: bool = True, window_left: int = -1) -> float:
    """Floating-point operations of a sequence: 4 D for every head, query and key that it sees."""
    position = torch.arange(kv_len - q_len, kv_len)
    seen = position + 1 if causal else torch.full_like(position, kv_len)
    if window_left >= 0:
        seen = seen.clamp(max=window_left + 1)
    return 4.0 * shape.head_dim * shape.q_heads * int(seen.clamp(min=0).sum())


def _beside_plain(name: str, plain: Shape, dtype: torch.dtype, work: float) -> tuple[dict[str, Call], dict[str, float]]:
    """flashq's plain call on a shape, as a contender `name`, and what its seconds are multiplied by to do `work`."""
    q, k, v = plain.inputs(dtype, seed=1000)
    return {name: lambda: flashq.prefill(q, k, v, causal=plain.causal)}, {name: work / plain.work}


# --- whole sequences --------------------------------------------------------------------------------------------------


def _prepare_dense(shape: Shape, dtype: torch.dtype) -> GpuSetup:
    def contenders(index: int) -> dict[str, Call]:
        q, k, v = shape.inputs(dtype, index)
        calls: dict[str, Call] = {"flashq": lambda: flashq.prefill(q, k, v, causal=shape.causal)}
        calls |= gpu_peers.sdpa(q, k, v, shape.causal)
        calls |= gpu_peers.fa3_calls((q, k, v), lambda fa3, *qkv: fa3.flash_attn_func(*qkv, causal=shape.causal))
        return calls

    return GpuSetup(contenders, shape.work, shape.footprint, "matmul", on_host=False)


def dense_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    shapes = [
        Shape(4, 16, 16, 4096, 128, causal=False),
        Shape(2, 16, 16, 8192, 128),
        Shape(1, 16, 16, 16384, 128, causal=False),
        Shape(1, 16, 16, 16384, 128),
        Shape(1, 32, 8, 8192, 128),
        Shape(16, 16, 16, 512, 128),
        Shape(1, 32, 8, 1024, 128),
        Shape(1, 8, 8, 16384, 256, causal=False),
        Shape(1, 8, 8, 16384, 256),
        Shape(1, 24, 4, 32768, 256),
        Shape(1, 32, 32, 16384, 64, causal=False),
        Shape(1, 32, 32, 16384, 64),
    ]
    for dtype, shape in itertools.product((BF16, FP16), shapes):
        used = replace(shape, tokens=min(shape.tokens, 256)) if quick else shape
        yield Case("dense", f"prefill {NAMES[dtype]} {used}", "TFLOP/s", partial(_prepare_dense, used, dtype))


# --- options ----------------------------------------------------------------------------------------------------------


def _prepare_option(
    shape: Shape, dtype: torch.dtype, plain_tokens: int, options: dict[str, Any], with_sinks: bool
) -> GpuSetup:
    """A causal call with options, beside a plain one and FlashAttention-3 with the same options (it has no sinks, its
    wheel no windows)."""
    window = options.get("window_left", -1)
    work = shape.batch * work_of(shape, shape.tokens, shape.tokens, window_left=window)
    plain, scale = _beside_plain("flashq without it", replace(shape, tokens=plain_tokens), dtype, work)

    def contenders(index: int) -> dict[str, Call]:
        q, k, v = shape.inputs(dtype, index)
        sinks = random_normal(shape.q_heads, dtype=torch.float32, seed=index) if with_sinks else None
        calls: dict[str, Call] = {"flashq": lambda: flashq.prefill(q, k, v, sinks, causal=True, **options)}
        calls |= plain
        if not with_sinks and window < 0:
            calls |= gpu_peers.fa3_calls((q, k, v), lambda fa3, *qkv: fa3.flash_attn_func(*qkv, causal=True, **options))
        return calls

    return GpuSetup(contenders, work, shape.footprint, on_host=False, scale=scale)


def _prepare_other_dim(shape: Shape, dtype: torch.dtype, head_dim: int) -> GpuSetup:
    """A head dim that runs in the tile of the next larger one: the two take the same time at best."""
    plain, _ = _beside_plain(f"flashq at D{head_dim}", replace(shape, head_dim=head_dim), dtype, 0.0)
    own = _prepare_dense(shape, dtype)
    return replace(own, contenders=lambda index: {**own.contenders(index), **plain}, ceiling=None)


def option_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    tokens = 256 if quick else 8192
    plain = [Shape(1, heads, heads, tokens, dim) for heads, dim in ((16, 128), (8, 256), (32, 64))]
    long = Shape(1, 32, 8, 512 if quick else 32768, 128)
    window = long.tokens // 8
    for dtype in (BF16, FP16):
        for shape in plain:
            row = f"{NAMES[dtype]} {shape}"
            prepare = partial(_prepare_option, shape, dtype, tokens)
            yield Case("options", f"sinks {row}", "TFLOP/s", partial(prepare, {}, True))
            yield Case("options", f"softcap {row}", "TFLOP/s", partial(prepare, {"softcap": CAP}, False))
        prepare = partial(_prepare_option, long, dtype, tokens, {"window_left": window}, False)
        yield Case("options", f"window of {window} {NAMES[dtype]} {long}", "TFLOP/s", prepare)
    for dtype, (dim, heads, tile) in itertools.product((BF16, FP16), ((80, 16, 128), (96, 16, 128), (192, 8, 256))):
        shape = Shape(1, heads, heads, tokens, dim)
        prepare = partial(_prepare_other_dim, shape, dtype, tile)
        yield Case("head dims", f"prefill {NAMES[dtype]} {shape}", "TFLOP/s", prepare)


# --- packed sequences, and short queries over long caches -------------------------------------------------------------


def _dense_name(dense: Shape) -> str:
    return f"flashq {dense.batch} x {dense.tokens}"


def _prepare_packed(lengths: list[int], shape: Shape, dtype: torch.dtype, dense: Shape) -> GpuSetup:
    """Sequences of `lengths` tokens; the heads are those of `shape`, one sequence of all tokens."""
    work = sum(work_of(shape, length, length) for length in lengths)
    plain, scale = _beside_plain(_dense_name(dense), dense, dtype, work)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    def contenders(index: int) -> dict[str, Call]:
        q, k, v = (x[0] for x in shape.inputs(dtype, index))
        calls: dict[str, Call] = {"flashq": lambda: flashq.prefill_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)}
        calls |= plain
        ends, most = (cu_seqlens, cu_seqlens), max(lengths)
        calls |= gpu_peers.fa3_calls(
            (q, k, v), lambda fa3, *qkv: fa3.flash_attn_varlen_func(*qkv, *ends, most, most, causal=True)
        )
        return calls

    return GpuSetup(contenders, work, shape.footprint, on_host=False, scale=scale)


def _prepare_continuation(q_len: int, shape: Shape, dtype: torch.dtype, dense: Shape) -> GpuSetup:
    """The last `q_len` tokens of a paged sequence of `shape`, its pages in random order."""
    work = work_of(shape, q_len, shape.tokens)
    plain, scale = _beside_plain(_dense_name(dense), dense, dtype, work)
    pages = shape.tokens // PAGE_SIZE
    table = random_permutation(pages).int()[None]
    seqlens = torch.tensor([shape.tokens], device="cuda", dtype=torch.int32)

    def contenders(index: int) -> dict[str, Call]:
        q, *dense_kv = shape.inputs(dtype, index)
        q = q[:, -q_len:].contiguous()
        k, v = (x.view(pages, PAGE_SIZE, shape.kv_heads, shape.head_dim) for x in dense_kv)
        calls: dict[str, Call] = {"flashq": lambda: flashq.decode(q, k, v, seqlens, table)}
        calls |= plain
        calls |= gpu_peers.fa3_calls(
            (q, *dense_kv),
            lambda fa3, *qkv: fa3.flash_attn_with_kvcache(*qkv, cache_seqlens=seqlens, causal=True),
            f"{gpu_peers.FA3} without pages",  # which its wheel does not have
        )
        return calls

    footprint = 4.0 * shape.head_dim * (shape.kv_heads * shape.tokens + shape.q_heads * q_len)
    return GpuSetup(contenders, work, footprint, on_host=False, scale=scale)


def sequence_cases(quick: bool) -> Iterator[Case[GpuSetup]]:
    dense = Shape(8, 32, 8, 256 if quick else 4096, 128)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 300 if quick else 4001, (64,), generator=generator).tolist()
    packed = Shape(1, 32, 8, sum(lengths), 128)
    for dtype in (BF16, FP16):
        name = f"packed {NAMES[dtype]} 64 x {min(lengths)} to {max(lengths)} tokens heads 32/8 D128 causal"
        yield Case("packed", name, "TFLOP/s", partial(_prepare_packed, lengths, packed, dtype, dense))
    layouts = itertools.product((BF16, FP16), ((512, 32768), (128, 131072)), ((32, 8, 128), (24, 4, 256)))
    for dtype, (q_len, tokens), (q_heads, kv_heads, dim) in layouts:
        shape = Shape(1, q_heads, kv_heads, tokens // 64 if quick else tokens, dim)
        own = replace(dense, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)
        used = min(q_len, shape.tokens)
        row = f"{used} tokens over {shape.tokens}, pages of {PAGE_SIZE}, heads {q_heads}/{kv_heads} D{dim} causal"
        prepare = partial(_prepare_continuation, used, shape, dtype, own)
        yield Case("continuation", f"continuation {NAMES[dtype]} {row}", "TFLOP/s", prepare)


def cases(quick: bool = False) -> list[Case[GpuSetup]]:
    """Every row, in the order of the report."""
    return [*dense_cases(quick), *option_cases(quick), *sequence_cases(quick)]
