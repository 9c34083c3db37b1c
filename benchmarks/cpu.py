"""The rows of `python -m benchmarks cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import flashq
from benchmarks import probes
from benchmarks.measure import Case, Setup
from flashq import tbq4

PAGE_SIZE = 64
SDPA, SDPA_FOLDED = "torch SDPA", "torch SDPA, group as queries"


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- prefill ----------------------------------------------------------------------------------------------------------


def _prepare_prefill(
    dtype: torch.dtype, batch: int, tokens: int, q_heads: int, kv_heads: int, head_dim: int, causal: bool
) -> Setup:
    q, k, v = (
        _random(batch, tokens, heads, head_dim, dtype=dtype, seed=seed)
        for seed, heads in enumerate((q_heads, kv_heads, kv_heads))
    )
    peers = [x.transpose(1, 2).contiguous() for x in (q, k, v)]  # (B, H, S, D), its own layout
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens
    calls = {
        "flashq": lambda: flashq.prefill(q, k, v, causal=causal),
        SDPA: lambda: F.scaled_dot_product_attention(*peers, is_causal=causal, enable_gqa=q_heads != kv_heads),
    }
    with_bf16 = dtype == torch.bfloat16 and probes.bf16_rate() > 0
    ceiling = probes.bf16_rate if with_bf16 else probes.fma_rate
    return Setup(calls, 4.0 * batch * q_heads * head_dim * pairs, ceiling)


def prefill_cases(quick: bool) -> Iterator[Case]:
    """q.k and p.v only, and of a causal row the visible pairs only, count as work."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shapes: list[tuple[torch.dtype, int, int, int, int, int, bool]] = [
        (fp32, 1, 4096, 8, 8, 128, True),
        (bf16, 1, 4096, 8, 8, 128, True),
        (fp16, 1, 4096, 8, 8, 128, True),
        (fp32, 1, 4096, 8, 2, 128, True),
        (bf16, 1, 4096, 8, 2, 128, True),
        (fp32, 1, 2048, 8, 8, 128, False),
        (bf16, 1, 2048, 8, 8, 64, True),
        (bf16, 1, 2048, 8, 4, 256, True),
        (bf16, 1, 1024, 8, 2, 128, True),
        (bf16, 8, 128, 8, 8, 64, True),
    ]
    if quick:
        shapes = [(fp32, 1, 512, 8, 8, 128, True), (bf16, 1, 512, 8, 2, 128, True)]
    for dtype, batch, tokens, q_heads, kv_heads, head_dim, causal in shapes:
        kind = "causal" if causal else "full"
        name = f"prefill {_name(dtype)} {kind} {batch}x{tokens} heads {q_heads}/{kv_heads} D{head_dim}"
        prepare = partial(_prepare_prefill, dtype, batch, tokens, q_heads, kv_heads, head_dim, causal)
        yield Case("prefill", name, "GFLOP/s", prepare)


# --- decode -----------------------------------------------------------------------------------------------------------


class _Context:
    """A batch of sequences of one length in paged caches, and what torch needs for the same."""

    def __init__(
        self, dtype: torch.dtype, batch: int, tokens: int, q_heads: int, kv_heads: int, head_dim: int, q_len: int
    ) -> None:
        self.pages = -(-tokens // PAGE_SIZE)
        self.tokens, self.kv_heads, self.head_dim = tokens, kv_heads, head_dim
        shape = (batch * self.pages, PAGE_SIZE, kv_heads, head_dim)
        self.k, self.v = (_random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        self.q = _random(batch, q_len, q_heads, head_dim, dtype=dtype, seed=0)
        order = torch.randperm(batch * self.pages, generator=torch.Generator().manual_seed(3))
        self.table = order.view(batch, self.pages).int()
        self.seqlens = torch.full((batch,), tokens, dtype=torch.int32)

    def decode(self) -> Callable[[], object]:
        return lambda: flashq.decode(self.q, self.k, self.v, self.seqlens, self.table)

    def torch_calls(self) -> dict[str, Callable[[], object]]:
        """torch's attention over contiguous (B, Hkv, L, D); its best layout, gathered before the clock starts."""
        k, v = (
            x[self.table.long()].flatten(1, 2)[:, : self.tokens].transpose(1, 2).contiguous() for x in (self.k, self.v)
        )
        q = self.q.transpose(1, 2).contiguous()
        group = q.shape[1] // self.kv_heads
        calls = {SDPA: lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)}
        if group > 1:  # what a careful user would write: the heads of a group as rows of one query
            folded = q.view(q.shape[0], self.kv_heads, group * q.shape[2], self.head_dim)
            calls[SDPA_FOLDED] = lambda: F.scaled_dot_product_attention(folded, k, v)
        return calls


Shape = tuple[int, int, int, int, int]  # batch, tokens, query heads, KV heads, head dim


def _decode_shapes(quick: bool) -> list[Shape]:
    if quick:
        return [(1, 2048, 8, 2, 128), (1, 256, 8, 8, 64)]
    return [
        (1, 32768, 32, 8, 128),
        (1, 32768, 8, 8, 128),
        (1, 32768, 64, 8, 128),
        (8, 4096, 32, 8, 128),
        (1, 4096, 32, 8, 128),
        (1, 1024, 32, 8, 128),
        (1, 256, 32, 8, 128),
        (1, 8192, 9, 3, 64),
    ]


def _shape_name(shape: Shape) -> str:
    batch, tokens, q_heads, kv_heads, head_dim = shape
    return f"{batch}x{tokens} heads {q_heads}/{kv_heads} D{head_dim}"


def _prepare_decode(dtype: torch.dtype, shape: Shape) -> Setup:
    context = _Context(dtype, *shape, q_len=1)
    calls = {"flashq": context.decode(), **context.torch_calls()}
    batch, tokens, _, kv_heads, head_dim = shape
    work = 2.0 * batch * tokens * kv_heads * head_dim * context.k.element_size()
    return Setup(calls, work, partial(probes.read_rate, [context.k, context.v]))


def decode_cases(quick: bool) -> Iterator[Case]:
    """One query a sequence. Work is the bytes of K and V, read once; the ceiling reads the same memory."""
    for index, shape in enumerate(_decode_shapes(quick)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if index == 0 else (torch.bfloat16,):
            name = f"decode {_name(dtype)} {_shape_name(shape)}"
            yield Case("decode", name, "GB/s", partial(_prepare_decode, dtype, shape))


def _prepare_tbq4(shape: Shape, recipe: bool) -> Setup:
    batch, tokens, _, kv_heads, head_dim = shape
    context = _Context(torch.bfloat16, *shape, q_len=1)
    planes = []
    for cache in (context.k, context.v):
        planes += flashq.tbq4_quantize(cache.transpose(1, 2).contiguous())
    options: dict[str, object] = {}
    if recipe:
        options["k_offsets"] = context.k.float().mean(1).half()
        # The 16-bit cache itself is the exact pool: which of its tokens are read is the same as of a small pool.
        options |= {"exact_k": context.k, "exact_v": context.v, "exact_block_table": context.table}
        options |= {"exact_first": 4, "exact_last": 64}
    call = partial(flashq.tbq4_attention, context.q, *planes, context.seqlens, context.table, **options)
    calls = {"flashq": call, "flashq decode bf16": context.decode(), **context.torch_calls()}
    row = head_dim // 2 + 2 * head_dim // tbq4.block_width(head_dim)
    return Setup(calls, 2.0 * batch * tokens * kv_heads * row, partial(probes.read_rate, planes))


def tbq4_cases(quick: bool) -> Iterator[Case]:
    """The same contexts from 4-bit planes. Work is the bytes of the planes; the ceiling reads them."""
    for index, shape in enumerate(_decode_shapes(quick)):
        for recipe in (False, True) if index == 0 else (False,):
            more = " offsets 4+64 exact" if recipe else ""
            yield Case("tbq4", f"tbq4 bf16 {_shape_name(shape)}{more}", "GB/s", partial(_prepare_tbq4, shape, recipe))


# --- codec and appends ------------------------------------------------------------------------------------------------


def _prepare_codec(op: str, dtype: torch.dtype, tokens: int, kv_heads: int, head_dim: int) -> Setup:
    x = _random(tokens, kv_heads, head_dim, dtype=dtype, seed=0)
    calls: dict[str, Callable[[], object]] = {}
    work = float(x.nbytes)
    if op == "tbq4_quantize":
        calls["flashq"] = lambda: flashq.tbq4_quantize(x)
    elif op == "tbq4_dequantize":
        codes, norms = flashq.tbq4_quantize(x)
        calls["flashq"] = lambda: flashq.tbq4_dequantize(codes, norms, dtype=dtype)
    elif op == "tbq4_rotate":
        calls["flashq"] = lambda: flashq.tbq4_rotate(x)
    else:
        work *= 2  # k and v
        slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
        pages = -(-tokens // PAGE_SIZE)
        if op == "kv_append_":
            caches = torch.zeros(2, pages, PAGE_SIZE, kv_heads, head_dim, dtype=dtype)
            calls["flashq"] = lambda: flashq.kv_append_(x, x, caches[0], caches[1], slots)
        else:
            planes = []
            for _ in "kv":
                planes += flashq.tbq4_quantize(torch.zeros(pages, kv_heads, PAGE_SIZE, head_dim))
            offsets = torch.zeros(pages, kv_heads, head_dim, dtype=torch.float16)
            calls["flashq"] = lambda: flashq.tbq4_append_(x, x, *planes, slots, offsets)
    target = torch.empty_like(x)
    copies = 2 if op.endswith("append_") else 1
    calls["torch copy_"] = lambda: [target.copy_(x) for _ in range(copies)]
    return Setup(calls, work)


def codec_cases(quick: bool) -> Iterator[Case]:
    """Work is the bytes of the unquantised side: the input, of appends k and v, of dequantize the output."""
    for op in ("tbq4_quantize", "tbq4_dequantize", "tbq4_rotate", "tbq4_append_", "kv_append_"):
        for tokens in (256,) if quick else (1, 16384):
            name = f"{op} bf16 {tokens} tokens heads 8 D128"
            yield Case("codec", name, "GB/s", partial(_prepare_codec, op, torch.bfloat16, tokens, 8, 128))


def cases(quick: bool = False) -> list[Case]:
    """Every row, in the order of the report."""
    return [case for make in (prefill_cases, decode_cases, tbq4_cases, codec_cases) for case in make(quick)]
