"""The rows of `python -m benchmarks decode`: few query tokens over long caches, beside torch's SDPA, FlashAttention-3
and the rate at which this GPU reads memory.

A row's work are the bytes of the keys and values that its queries see, each once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import empty_op, gpu_peers
from benchmarks.gpu import GpuSetup
from benchmarks.gpu_graphs import input_sets, random_normal
from benchmarks.measure import Case
from flashq.cli.timing import Call

DTYPE = torch.bfloat16
WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, in a cache without pages."""

    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    q_len: int = 1
    heads_first: bool = False
    """The cache lies in memory as (batch, kv_heads, tokens, head_dim), else as (batch, tokens, kv_heads, head_dim)."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        name = f"{self.batch} x {self.tokens} heads {self.q_heads}/{self.kv_heads} D{self.head_dim}"
        name += f" {self.q_len} queries" * (self.q_len > 1) + " heads first" * self.heads_first
        return name + "".join(f" {option}={value}" for option, value in self.options.items())

    @property
    def work(self) -> float:
        """Bytes of keys and values."""
        return 4.0 * self.batch * self.kv_heads * self.tokens * self.head_dim

    def caches(self, seed: int) -> tuple[Tensor, Tensor]:
        """k_cache and v_cache (batch, tokens, kv_heads, head_dim)."""
        heads, tokens = self.kv_heads, self.tokens
        sizes = (heads, tokens) if self.heads_first else (tokens, heads)
        pair = [random_normal(self.batch, *sizes, self.head_dim, dtype=DTYPE, seed=2 * seed + i) for i in (0, 1)]
        k, v = (x.transpose(1, 2) for x in pair) if self.heads_first else pair
        return k, v


def _lengths(values: list[int]) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _prepare(shape: Shape, peers: bool, on_host: bool) -> GpuSetup:
    def contenders(index: int) -> dict[str, Call]:
        k, v = shape.caches(index)
        q = random_normal(shape.batch, shape.q_len, shape.q_heads, shape.head_dim, dtype=DTYPE, seed=1000 + index)
        seqlens = _lengths([shape.tokens] * shape.batch)
        calls: dict[str, Call] = {"flashq": lambda: torch.ops.flashq.decode(q, k, v, seqlens, **shape.options)}
        if peers:
            calls |= gpu_peers.sdpa(q, k, v, causal=False)
            calls |= gpu_peers.fa3_calls(
                (q, k, v), lambda fa3, *qkv: fa3.flash_attn_with_kvcache(*qkv, cache_seqlens=seqlens)
            )
        return calls

    nothing = torch.empty(1, 1, 1, shape.head_dim, device="cuda", dtype=DTYPE)
    host_peers = {empty_op.NAME: lambda: empty_op.decode()(nothing, nothing, nothing, nothing)}
    return GpuSetup(contenders, shape.work, shape.work, "read", on_host, host_peers if on_host else {})


def _prepare_window(shape: Shape) -> GpuSetup:
    """The last WINDOW tokens of a long sequence; every input set is another sequence of one cache."""
    seen = replace(shape, tokens=WINDOW)
    k, v = shape.caches(0)
    q = random_normal(1, 1, shape.q_heads, shape.head_dim, dtype=DTYPE, seed=2)

    def contenders(index: int) -> dict[str, Call]:
        seqlens = _lengths([shape.tokens - index * WINDOW])
        return {"flashq": lambda: torch.ops.flashq.decode(q, k, v, seqlens, window_left=WINDOW - 1)}

    sets = input_sets(seen.work)
    if sets * WINDOW > shape.tokens:
        raise RuntimeError(f"benchmarks: decode: {sets} windows do not fit {shape.tokens} tokens")
    return GpuSetup(contenders, seen.work, seen.work, "read", on_host=False)


def _prepare_ragged(shape: Shape, page_size: int) -> GpuSetup:
    """Sequences of 1 to `shape.tokens` tokens, evenly spread over the logarithm, on pages in random order."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(shape.batch, generator=generator) * math.log(shape.tokens)).exp().int().clamp(1)
    needed = [-(-length // page_size) for length in lengths.tolist()]
    order = torch.randperm(sum(needed), generator=generator).int().split(needed)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1).cuda()
    seqlens = lengths.cuda()
    work = shape.work / shape.batch / shape.tokens * int(lengths.sum())

    def contenders(index: int) -> dict[str, Call]:
        pages = replace(shape, batch=sum(needed), tokens=page_size)
        k, v = pages.caches(index)
        q = random_normal(shape.batch, 1, shape.q_heads, shape.head_dim, dtype=DTYPE, seed=1000 + index)
        return {"flashq": lambda: torch.ops.flashq.decode(q, k, v, seqlens, table)}

    return GpuSetup(contenders, work, work, "read", on_host=False)


def _case(suite: str, name: str, prepare: Callable[[], GpuSetup]) -> Case[GpuSetup]:
    return Case(suite, f"decode {name}", "GB/s", prepare)


def cases(quick: bool = False) -> list[Case[GpuSetup]]:
    """Every row, in the order of the report."""
    return list(_cases(64 if quick else 1))


def _cases(smaller: int) -> Iterator[Case[GpuSetup]]:
    def short(shape: Shape) -> Shape:
        return replace(shape, tokens=shape.tokens // smaller)

    one = [
        Shape(1, 24, 4, 262144, 256),
        Shape(1, 32, 8, 131072, 128),
        Shape(16, 32, 8, 16384, 128),
        Shape(64, 32, 8, 4096, 128),
        Shape(64, 64, 8, 8192, 128),
        Shape(128, 32, 8, 1024, 128),
        Shape(8, 24, 4, 32768, 256),
        Shape(1, 32, 8, 4096, 128),
        Shape(1, 32, 8, 1024, 128),
        Shape(64, 32, 32, 4096, 128),
        Shape(4, 64, 4, 65536, 128),
        Shape(8, 63, 1, 65536, 128),
    ]
    for shape in map(short, one):
        yield _case("decode", str(shape), partial(_prepare, shape, peers=True, on_host=shape.batch == 1))
    middle = one[2]
    others = [replace(shape, heads_first=True) for shape in (one[0], one[1], middle, one[3], one[6])]
    others += [replace(middle, q_len=q_len) for q_len in (2, 4, 8, 16)]
    others += [replace(middle, options={"kv_chunk": 512})]
    for shape in map(short, others):
        yield _case("variants", str(shape), partial(_prepare, shape, peers=False, on_host=False))
    long = one[1]
    name = f"window of {WINDOW} in {long}"
    yield _case("variants", name, partial(_prepare_window, long))
    ragged = short(Shape(64, 32, 8, 32768, 128))
    for page_size in (16, 64):
        name = f"64 x 1..{ragged.tokens} heads 32/8 D128 pages of {page_size}"
        yield _case("variants", name, partial(_prepare_ragged, ragged, page_size))
