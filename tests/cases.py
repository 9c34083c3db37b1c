"""Inputs of the tests: strides of every kind, paged caches with poison wherever nobody may look."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor

import flashq
from flashq import reference
from flashq.cli.machine import cpu_levels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 40, 80, 96, 192, 256, 8)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 63)  # query heads a KV head
SCALES = (None, 0.3, -0.11, 0.0)
SINKS = ("none", "some", "minus_inf")
PAGE_SIZES = (16, 64, 1, 48, 256)
GARBAGE_PAGES = (2147480000, -7)
LAYOUTS = ("contiguous", "heads_first", "padded", "one_head")
ATTENTION = ("prefill", "decode", "tbq4_attention")
ON_CUDA = ("prefill", "prefill_varlen", "decode", "tbq4_attention", "exact pool")  # for 16 bits
NAN, INF = float("nan"), float("inf")


def pairwise(**values: Sequence) -> list[dict]:
    """Cases in which every pair of values of every two parameters occurs; always the same ones."""
    names = list(values)
    return [dict(zip(names, row, strict=True)) for row in AllPairs([list(v) for v in values.values()])]


def with_cuda(cases: list[dict], **values: Sequence) -> list:
    """The CPU's cases, and pairwise ones of `values` for CUDA: the parameter `backend` tells them apart."""
    on_cuda = [case | {"backend": "cuda"} for case in pairwise(**values)]
    return [*cases, *(pytest.param(case, marks=pytest.mark.cuda) for case in on_cuda)]


def everywhere(**values: Sequence) -> pytest.MarkDecorator:
    """Parametrizes a test of attention: every combination of `values` on every backend that has it.

    CUDA has the ops of ON_CUDA, and no float32.
    """
    rows = []
    for row in itertools.product(*values.values()):
        case = dict(zip(values, row, strict=True))
        rows += [pytest.param(*row, level) for level in cpu_levels().available]
        if case.get("dtype") != torch.float32 and case.get("op", "prefill") in ON_CUDA:
            rows.append(pytest.param(*row, "cuda", marks=pytest.mark.cuda))
    return pytest.mark.parametrize((*values, "backend"), rows, indirect=["backend"])


def plain_dtype(device: torch.device) -> torch.dtype:
    """The dtype of tests of attention that need but one."""
    return torch.float16 if device.type == "cuda" else torch.float32


def case_id(case: dict) -> str:
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """x (..., S, H, D) in other strides, the last one 1. "one_head" has a zero stride: every head equals the first."""
    if layout == "heads_first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "padded":  # rows further apart, and a base that no vector load can use
        room = x.new_full((*x.shape[:-1], x.shape[-1] + 5), float("nan"))
        room[..., 1:-4] = x
        return room[..., 1:-4]
    if layout == "spaced":  # rows further apart, every one at a multiple of 16 bytes
        room = x.new_full((*x.shape[:-1], x.shape[-1] + 16), float("nan"))
        room[..., 8:-8] = x
        return room[..., 8:-8]
    if layout == "one_head":
        return x[..., :1, :].contiguous().expand(x.shape)
    return x.contiguous()


def move(x: Any, device: torch.device | str) -> Any:
    """x on the device, if it is a tensor; strides, offset and whatever lies between the values stay."""
    device = torch.device(device)
    if not isinstance(x, Tensor) or x.device.type == device.type:
        return x
    room = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
    return room.as_strided(x.shape, x.stride(), x.storage_offset())


def call(op: str, *args: Any, device: torch.device | str = "cpu", **options: Any) -> tuple[Tensor, Tensor]:
    """An op on the device, of tensors that come from the CPU; the results come back."""
    moved = {name: move(x, device) for name, x in options.items()}
    out, lse = getattr(flashq, op)(*(move(x, device) for x in args), **moved)
    return out.cpu(), lse.cpu()


def make_sinks(kind: str, heads: int) -> Tensor | None:
    if kind == "none":
        return None
    sinks = 2 * randn(heads, seed=99)
    if kind == "minus_inf":
        sinks[::2] = float("-inf")
    return sinks


def first_visible(length: int, q_len: int, start: int, window_left: int) -> int:
    """The first key that any query of a sequence sees."""
    if q_len == 0:
        return length
    return start if window_left < 0 else max(start, length - q_len - window_left)


def attend(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, device: torch.device | str = "cpu", **options: Any
) -> tuple[Tensor, Tensor]:
    """One of the three attention ops on plain q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D) of the CPU."""
    lengths = torch.full((len(k),), k.shape[1])
    if op == "prefill":
        return call(op, q, k, v, device=device, **options)
    if op == "decode":
        return call(op, q, k, v, lengths, device=device, **options)
    planes = [x.transpose(1, 2).contiguous() for y in (k, v) for x in flashq.tbq4_quantize(y)]
    return call(op, q, *planes, lengths, device=device, **options)


class Paged(NamedTuple):
    """A paged cache of sequences, (P, N, Hkv, D), its table and its lengths."""

    k: Tensor
    v: Tensor
    block_table: Tensor
    seqlens: Tensor


def page_out(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    page_size: int,
    *,
    index_dtype: torch.dtype = torch.int32,
    layout: str = "contiguous",
    kv_start: Sequence[int] | None = None,
    first_seen: Sequence[int] | None = None,
    seed: int = 0,
) -> Paged:
    """Sequences (L, Hkv, D) into shuffled pages. NaN fills slots past a length, before kv_start, and pages that nobody
    owns; table entries past a length, before kv_start, and of pages wholly before first_seen are garbage."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-len(k) // page_size) for k in keys]
    total = sum(needed) + 2
    order = torch.randperm(total, generator=generator).tolist()
    caches = [keys[0].new_full((total, page_size, *keys[0].shape[1:]), float("nan")) for _ in range(2)]
    table = torch.tensor(GARBAGE_PAGES, dtype=index_dtype).repeat(len(keys), max(needed, default=0) // 2 + 2)
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        start = kv_start[b] if kv_start else 0
        for i in range(needed[b]):
            page = order.pop()
            if (i + 1) * page_size > max(start, first_seen[b] if first_seen else 0):
                table[b, i] = page
            for cache, rows in zip(caches, (k, v), strict=True):
                tokens = rows[i * page_size : (i + 1) * page_size].clone()
                tokens[: max(0, start - i * page_size)] = float("nan")
                cache[page, : len(tokens)] = tokens
    lengths = torch.tensor([len(k) for k in keys], dtype=index_dtype)
    return Paged(*(lay_out(c, layout) for c in caches), table, lengths)


class Planes(NamedTuple):
    """A paged TBQ4 cache: planes, page offsets or None, table and lengths."""

    k_codes: Tensor
    k_norms: Tensor
    v_codes: Tensor
    v_norms: Tensor
    k_offsets: Tensor | None
    block_table: Tensor
    seqlens: Tensor

    def args(self) -> tuple[Tensor, ...]:
        """The positional arguments of tbq4_attention between q and cu_seqlens_q."""
        return (*self[:4], self.seqlens, self.block_table)


def encode_pages(cache: Paged, offsets: Tensor | None = None, *, poison: bool = True) -> Planes:
    """The TBQ4 planes of a paged cache, written by the reference codec. Slots of NaN keep a NaN norm and codes 255."""
    keys, values = cache.k.float(), cache.v.float()
    if offsets is not None:
        keys = keys - offsets[:, None].float()
    planes = []
    for rows in (keys, values):
        codes, norms = reference.tbq4_quantize(rows)
        if poison:
            codes[rows.isnan().any(-1)] = 255
        planes += [codes.transpose(1, 2).contiguous(), norms.transpose(1, 2).contiguous()]
    return Planes(*planes, offsets, cache.block_table, cache.seqlens)
