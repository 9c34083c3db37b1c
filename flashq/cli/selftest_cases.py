"""What the self-test runs: small cases, at least one an op, each compared with flashq.reference.

A case is a function of a device that yields comparisons. Inputs are made on the CPU from a fixed seed, the reference
runs there, and only the op under test sees the device. Tolerances are those of docs/contract.md, "Accuracy".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashq
from flashq import reference, tbq4


class Comparison(NamedTuple):
    """One figure that must not exceed its bound; NaN fails."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound


Case = Callable[[str], Iterator[Comparison]]


def eager(op: str, *arguments: Any, **options: Any) -> Any:
    """flashq.reference.<op>, on one thread: on a busy machine its many small steps spend their time waking others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return getattr(reference, op)(*arguments, **options)
    finally:
        torch.set_num_threads(threads)


def _worst(left: Tensor, right: Tensor) -> float:
    """Largest |left - right|; equal infinities differ by nothing."""
    left, right = left.cpu().double(), right.cpu().double()
    return torch.where(left == right, 0.0, (left - right).abs()).max().item()


def _different(left: Tensor, right: Tensor) -> Comparison:
    """How many bytes differ; none may."""
    left, right = (x.cpu().contiguous().view(torch.uint8) for x in (left, right))
    return Comparison("bytes that differ", float((left != right).sum()), 0.0)


def _random(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(dtype)


def _attention(op: str, tensors: dict[str, Tensor | None], device: str, **options: Any) -> Iterator[Comparison]:
    """Compare a 16/32-bit attention op with fp32 eager, and with what eager loses in the inputs' own dtype."""
    stats: dict[str, float] = {}
    dtype = tensors["q"].dtype
    expected, expected_lse = eager(op, **tensors, **options, stats=stats)
    rounded, _ = eager(op, **tensors, **options, dtype=dtype)
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    out, lse = getattr(flashq, op)(**moved, **options)
    name = str(dtype).removeprefix("torch.")
    yield Comparison(f"{name} out", _worst(out, expected), 2 * _worst(rounded.to(dtype), expected) + 1e-5)
    absolute, relative = (1e-5, 5e-7) if dtype == torch.float32 else (1e-4, 1e-6)
    if device == "cuda" and options.get("softcap"):
        absolute, relative = 1e-4, 5e-4  # the hardware's tanh
    yield Comparison(f"{name} lse", _worst(lse, expected_lse), absolute + relative * stats["max_score"])


def _dtypes(device: str) -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16] + [torch.float32] * (device == "cpu")


def check_prefill(device: str) -> Iterator[Comparison]:
    for seed, dtype in enumerate(_dtypes(device)):
        random = _random(seed)
        q, k, v = (random(2, n, h, 64, dtype=dtype) for n, h in ((70, 6), (150, 2), (150, 2)))
        yield from _attention("prefill", {"q": q, "k": k, "v": v}, device, causal=True)
        sinks = random(6)
        options = {"window_left": 40, "window_right": 3, "softcap": 5.0}
        q, k, v = (x[..., :40] for x in (q, k, v))
        yield from _attention("prefill", {"q": q, "k": k, "v": v, "sinks": sinks}, device, **options)


def check_prefill_varlen(device: str) -> Iterator[Comparison]:
    for seed, dtype in enumerate(_dtypes(device)):
        random = _random(seed)
        q, k, v = (random(n, h, 128, dtype=dtype) for n, h in ((60, 8), (200, 2), (200, 2)))
        ends = {
            "cu_seqlens_q": torch.tensor([0, 37, 37, 60]),  # the second sequence has no query,
            "cu_seqlens_k": torch.tensor([0, 150, 190, 200]),  # and queries of the third see nothing
        }
        yield from _attention("prefill_varlen", {"q": q, "k": k, "v": v, **ends}, device, causal=True)


def check_decode(device: str) -> Iterator[Comparison]:
    for seed, dtype in enumerate(_dtypes(device)):
        random = _random(seed)
        k, v = (random(13, 16, 2, 96, dtype=dtype) for _ in "kv")
        seqlens = torch.tensor([83, 0, 64], dtype=torch.int32)
        table = torch.full((3, 6), 2147480000, dtype=torch.int32)  # entries that nothing needs are garbage
        table[0], table[2, :4] = torch.tensor([7, 2, 11, 0, 5, 9]), torch.tensor([1, 12, 3, 8])
        k[9, 3:], v[9, 3:] = float("nan"), float("inf")  # and so are the bytes past the length
        tensors = {"q": random(3, 2, 8, 96, dtype=dtype), "k_cache": k, "v_cache": v, "seqlens": seqlens}
        tensors |= {"block_table": table, "kv_start": torch.tensor([5, 0, 33], dtype=torch.int32)}
        yield from _attention("decode", tensors, device)


def check_kv_append(device: str) -> Iterator[Comparison]:
    for seed, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32)):
        random = _random(seed)
        k, v = random(9, 3, 80, dtype=dtype), random(9, 3, 80, dtype=dtype)
        slots = torch.tensor([3, 17, -1, 0, 31, 8, 9, 10, 40])
        expected = torch.zeros(2, 3, 16, 3, 80, dtype=dtype)
        caches = expected.to(device, copy=True)
        eager("kv_append_", k, v, expected[0], expected[1], slots)
        flashq.kv_append_(k.to(device), v.to(device), caches[0], caches[1], slots.to(device))
        yield _different(caches, expected)


def _rows(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows for the codec (64, head_dim): random ones of many sizes, outliers, a constant, zeros."""
    rows = _random(head_dim)(64, head_dim) * torch.logspace(-3, 3, 64)[:, None]
    rows[::8, 5] *= 100
    rows[1], rows[2] = 3.0, 0.0
    return rows.to(dtype)


def check_tbq4_quantize(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = _rows(head_dim, dtype)
            planes = zip(flashq.tbq4_quantize(rows.to(device)), eager("tbq4_quantize", rows), strict=True)
            for ours, expected in planes:
                yield _different(ours, expected)
        noise = _random(1)(4000, head_dim)
        decoded = flashq.tbq4_dequantize(*flashq.tbq4_quantize(noise.to(device))).cpu()
        error = (((decoded - noise) ** 2).sum(-1) / (noise**2).sum(-1)).mean().item()
        published = tbq4.EXPECTED_ERROR["gaussian"][head_dim]
        yield Comparison("distance to the published error", abs(error - published), 1e-4)


def check_tbq4_dequantize(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        codes, norms = eager("tbq4_quantize", _rows(head_dim, torch.float32))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            ours = flashq.tbq4_dequantize(codes.to(device), norms.to(device), dtype=dtype)
            yield _different(ours, eager("tbq4_dequantize", codes, norms, dtype=dtype))


def check_tbq4_rotate(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        rows = _random(head_dim)(64, head_dim)
        for inverse in (False, True):
            ours = flashq.tbq4_rotate(rows.to(device), inverse=inverse)
            expected = eager("tbq4_rotate", rows, inverse=inverse, dtype=torch.float64)
            yield Comparison("out", _worst(ours, expected), 1e-5)


def _planes(pages: int, kv_heads: int, page_size: int, head_dim: int) -> list[Tensor]:
    """Empty planes: k_codes, k_norms, v_codes, v_norms."""
    lead = (pages, kv_heads, page_size)
    codes = torch.zeros(*lead, head_dim // 2, dtype=torch.uint8)
    norms = torch.zeros(*lead, head_dim // tbq4.block_width(head_dim), dtype=torch.float16)
    return [codes, norms, codes.clone(), norms.clone()]


def check_tbq4_append(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        random = _random(head_dim)
        k, v, slots = random(20, 3, head_dim) + 5, random(20, 3, head_dim), torch.randperm(48)[:20]
        slots[4] = -1
        expected = _planes(3, 3, 16, head_dim)
        planes = [plane.to(device, copy=True) for plane in expected]
        offsets = (random(3, 3, head_dim) + 5).half()
        eager("tbq4_append_", k, v, *expected, slots, offsets)
        flashq.tbq4_append_(k.to(device), v.to(device), *planes, slots.to(device), offsets.to(device))
        for ours, wanted in zip(planes, expected, strict=True):
            yield _different(ours, wanted)


def check_tbq4_rope_append(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        random = _random(head_dim)
        q, k, v = (random(9, heads, head_dim, dtype=torch.bfloat16) for heads in (6, 2, 2))
        angle = random(40, head_dim // 4)
        tables, positions = (angle.cos(), angle.sin()), torch.randperm(40)[:9]
        slots, exact_slots = torch.randperm(48)[:9], torch.randperm(12)[:9] - 1
        expected = [*_planes(3, 2, 16, head_dim), *(torch.zeros(3, 4, 2, head_dim).bfloat16() for _ in "kv")]
        written = [x.to(device, copy=True) for x in expected]
        offsets = random(3, 2, head_dim).half()
        moved = [x.to(device) for x in (q, k, v, *tables, positions, slots, offsets, exact_slots)]
        truth = eager(
            "tbq4_rope_append_", q, k, v, *tables, positions, *expected[:4], slots, offsets, *expected[4:], exact_slots
        )
        turned = flashq.tbq4_rope_append_(*moved[:6], *written[:4], *moved[6:8], *written[4:], moved[8])
        for ours, wanted in zip((turned, *written), (truth, *expected), strict=True):
            yield _different(ours, wanted)


def check_tbq4_page_offsets(device: str) -> Iterator[Comparison]:
    for head_dim in tbq4.HEAD_DIMS:
        random = _random(head_dim)
        keys, new = random(48, 2, head_dim) + 5, random(40, 2, head_dim) + 5
        planes, offsets = _planes(6, 2, 16, head_dim), torch.zeros(6, 2, head_dim, dtype=torch.float16)
        eager("tbq4_append_", keys, keys, *planes, torch.arange(48))
        lengths, table = torch.tensor([38, 35]), torch.tensor([[2, 5, 0], [1, 3, 4]])  # 35 and 5 of them are new
        pool, pool_table = random(3, 16, 2, head_dim), torch.tensor([[-1, -1, -1], [-1, 1, 0]])
        more = (lengths, table, torch.tensor([0, 35, 40]), torch.tensor([3, 0]), pool, pool_table)
        expected = offsets.clone()
        eager("tbq4_page_offsets_", new, *planes[:2], expected, *more)
        ours = offsets.to(device, copy=True)
        moved = (x.to(device) for x in (new, *planes[:2]))
        flashq.tbq4_page_offsets_(*moved, ours, *(x.to(device) for x in more))
        yield _different(ours, expected)


def check_tbq4_attention(device: str) -> Iterator[Comparison]:
    page_size, pages = 16, 9
    for head_dim in tbq4.HEAD_DIMS:
        for dtype in _dtypes(device):
            random = _random(head_dim)
            k, v = (random(pages * page_size, 2, head_dim, dtype=dtype) for _ in "kv")
            k += 4
            offsets = k.view(pages, page_size, 2, head_dim).float().mean(1).half()
            planes = _planes(pages, 2, page_size, head_dim)
            eager("tbq4_append_", k, v, *planes, torch.arange(len(k)), offsets)
            q, table = random(2, 2, 6, head_dim, dtype=dtype), torch.tensor([[4, 0, 7, 2, 8], [1, 3, 5, 6, 6]])
            tensors = {"seqlens": torch.tensor([75, 50]), "block_table": table, "k_offsets": offsets}
            exact = {f"exact_{name}": x.view(pages, page_size, 2, head_dim) for name, x in (("k", k), ("v", v))}
            exact["exact_block_table"] = table
            for more, options in (({}, {}), (exact, {"exact_first": 4, "exact_last": 20})):
                stats: dict[str, float] = {}
                expected, expected_lse = eager("tbq4_attention", q, *planes, **tensors, **more, **options, stats=stats)
                moved = {name: tensor.to(device) for name, tensor in {**tensors, **more}.items()}
                out, lse = flashq.tbq4_attention(
                    q.to(device), *(x.to(device) for x in planes), **moved, **options, out_dtype=torch.float32
                )
                error = ((out.cpu() - expected).norm() / expected.norm()).item()
                yield Comparison("relative error of out", error, 2e-3)
                bound = 2e-3 + 5e-5 * stats["max_score_no_offset"] + 1e-6 * stats["max_score"]
                yield Comparison("lse", _worst(lse, expected_lse), bound)


def check_merge_states(device: str) -> Iterator[Comparison]:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        random = _random(3)
        outs, lses = random(4, 2, 5, 6, 64, dtype=dtype), random(4, 2, 6, 5) * 4
        lses[0, 0], lses[:, 1, 2] = float("-inf"), float("-inf")
        expected, expected_lse = eager("merge_states", outs, lses, dtype=torch.float64)
        out, lse = flashq.merge_states(outs.to(device), lses.to(device))
        yield Comparison("out", _worst(out, expected), 1e-6 + 2 * _worst(expected.to(dtype), expected))
        yield Comparison("lse", _worst(lse, expected_lse), 1e-5)


CASES: dict[str, Case] = {
    "prefill": check_prefill,
    "prefill_varlen": check_prefill_varlen,
    "decode": check_decode,
    "kv_append_": check_kv_append,
    "tbq4_quantize": check_tbq4_quantize,
    "tbq4_dequantize": check_tbq4_dequantize,
    "tbq4_rotate": check_tbq4_rotate,
    "tbq4_append_": check_tbq4_append,
    "tbq4_rope_append_": check_tbq4_rope_append,
    "tbq4_page_offsets_": check_tbq4_page_offsets,
    "tbq4_attention": check_tbq4_attention,
    "merge_states": check_merge_states,
}
