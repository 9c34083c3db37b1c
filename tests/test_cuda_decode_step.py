"""A decode step of all layers in one CUDA graph, over a 4-bit cache: replays with other lengths, slots and positions;
and what memory attention takes beside its cache."""

from __future__ import annotations

from typing import Any

import golden
import pytest
import torch
from accuracy import assert_lse, relative_l2
from cases import randn
from torch import Tensor

import flashq
from flashq import reference, tbq4

pytestmark = pytest.mark.cuda

LAYERS, PAGE_SIZE, EXACT_FIRST, EXACT_LAST = 3, 16, 4, 20
PLANES = ("k_codes", "k_norms", "v_codes", "v_norms")


class Step:
    """One token of every sequence through the layers, on one device. Tensors stay at their addresses."""

    def __init__(self, lengths: list[int], head_dim: int, dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
        batch, width = len(lengths), 12
        pages, blocks = batch * width, head_dim // tbq4.block_width(head_dim)
        angle = torch.arange(width * PAGE_SIZE)[:, None] * 1e4 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).view(batch, width)
        self.shared = {
            "cos": angle.cos(), "sin": angle.sin(), "block_table": order.int(), "seqlens": torch.tensor(lengths),
            "positions": torch.zeros(batch, dtype=torch.int64), "slots": torch.zeros(batch, dtype=torch.int64),
        }  # fmt: skip
        self.layers: list[dict[str, Tensor]] = []
        for layer in range(LAYERS):
            tensors = {f"{x}_codes": torch.zeros(pages, kv_heads, PAGE_SIZE, head_dim // 2).byte() for x in "kv"}
            tensors |= {f"{x}_norms": torch.zeros(pages, kv_heads, PAGE_SIZE, blocks).half() for x in "kv"}
            tensors["k_offsets"] = (3 * randn(pages, kv_heads, head_dim, seed=layer)).half()
            tensors |= {f"exact_{x}": torch.zeros(pages, PAGE_SIZE, kv_heads, head_dim, dtype=dtype) for x in "kv"}
            heads = {"q": q_heads, "k": kv_heads, "v": kv_heads}
            tensors |= {name: torch.zeros(batch, n, head_dim, dtype=dtype) for name, n in heads.items()}
            self.layers.append(tensors)
            for b, length in enumerate(lengths):  # what came before the first step
                old = (randn(length, kv_heads, head_dim, dtype=dtype, seed=7 * layer + b + i) for i in range(2))
                at = torch.arange(length)
                self._write(tensors, *old, order[b, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)

    @staticmethod
    def _write(layer: dict[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        flashq.tbq4_append_(k, v, *(layer[name] for name in PLANES), slots, layer["k_offsets"])
        flashq.kv_append_(k, v, layer["exact_k"], layer["exact_v"], slots)

    def to(self, device: str) -> Step:
        other = object.__new__(Step)
        other.shared = {name: x.to(device) for name, x in self.shared.items()}
        other.layers = [{name: x.to(device) for name, x in layer.items()} for layer in self.layers]
        return other

    def set(self, seed: int) -> None:
        """The next token of every sequence: one step longer, or some further back in its past."""
        table, s = self.shared["block_table"].cpu(), self.shared
        position = (s["seqlens"].cpu() - 11 * (seed % 3 == 0)).clamp(min=0)
        slots = table[torch.arange(len(table)), position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        for name, x in (("seqlens", position + 1), ("positions", position), ("slots", slots)):
            s[name].copy_(x)
        for i, layer in enumerate(self.layers):
            for j, name in enumerate("qkv"):
                layer[name].copy_(randn(*layer[name].shape, dtype=layer[name].dtype, seed=100 * seed + 3 * i + j))

    def run(self, ops: object, **options: Any) -> list[tuple[Tensor, Tensor]]:
        """Out in fp32 and lse of every layer; `ops` is flashq, or its reference."""
        s, results = self.shared, []
        for x in self.layers:
            q = ops.tbq4_rope_append_(
                x["q"], x["k"], x["v"], s["cos"], s["sin"], s["positions"], *(x[name] for name in PLANES), s["slots"],
                x["k_offsets"], x["exact_k"], x["exact_v"], s["slots"],
            )  # fmt: skip
            out, lse = ops.tbq4_attention(
                q[:, None], *(x[name] for name in PLANES), s["seqlens"], s["block_table"], k_offsets=x["k_offsets"],
                exact_k=x["exact_k"], exact_v=x["exact_v"], exact_block_table=s["block_table"],
                exact_first=EXACT_FIRST, exact_last=EXACT_LAST, out_dtype=torch.float32, **options,
            )  # fmt: skip
            results.append((out, lse))
        return results


@pytest.mark.contract(12, 17)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "q_heads", "kv_heads"),
    [(256, torch.bfloat16, 6, 1), (128, torch.float16, 8, 2), (64, torch.bfloat16, 3, 3)],
)
def test_a_step_replays(head_dim: int, dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
    theirs = Step([30, 0, 15, 120], head_dim, dtype, q_heads, kv_heads)
    ours = theirs.to("cuda")
    for step in (ours, theirs):
        step.set(1)
    ours.run(flashq)  # a first call outside of the capture; the replay writes the same again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ours.run(flashq)
    for seed in range(1, 8):
        for step in (ours, theirs):
            step.set(seed) if seed > 1 else None
        graph.replay()
        stats: reference.Stats = {}
        truths = theirs.run(reference, stats=stats)
        bound = 2e-3 + 5e-5 * stats["max_score_no_offset"] + 1e-6 * stats["max_score"]
        for (out, lse), (truth, true_lse) in zip(results, truths, strict=True):
            assert relative_l2(out.cpu(), truth) <= 2e-3
            assert_lse(lse.cpu(), true_lse, bound)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert all(golden.same_bits(mine[name].cpu(), other[name]) for name in (*PLANES, "exact_k", "exact_v"))


@pytest.mark.contract(12, 17)
@pytest.mark.parametrize("q_len", [1, 512])
def test_attention_takes_no_copy_of_its_cache(q_len: int) -> None:
    """At most 64 MiB beside 262,144 tokens of 4 heads of 256 values, which in 16 bits take 1 GiB."""
    tokens, heads, head_dim, page_size = 262_144, 4, 256, 64
    pages, cuda = tokens // page_size, torch.device("cuda")
    codes = torch.zeros(2, pages, heads, page_size, head_dim // 2, dtype=torch.uint8, device=cuda)
    norms = torch.ones(2, pages, heads, page_size, 2, dtype=torch.float16, device=cuda)
    offsets = torch.zeros(pages, heads, head_dim, dtype=torch.float16, device=cuda)
    table = torch.arange(pages, dtype=torch.int32, device=cuda)[None]
    exact = torch.zeros(2, 3, page_size, heads, head_dim, dtype=torch.bfloat16, device=cuda)
    exact_table = torch.full_like(table, -1)
    exact_table[0, [0, -2, -1]] = torch.arange(3, dtype=torch.int32, device=cuda)
    q, k, v = (torch.ones(q_len, n, head_dim, dtype=torch.bfloat16, device=cuda) for n in (24, heads, heads))
    angles = torch.zeros(tokens, head_dim // 2, device=cuda)
    positions = torch.arange(tokens - q_len, tokens, device=cuda)
    planes = (codes[0], norms[0], codes[1], norms[1])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        turned = flashq.tbq4_rope_append_(q, k, v, angles, angles, positions, *planes, positions, offsets)
        flashq.tbq4_attention(
            turned[None], *planes, torch.tensor([tokens], device=cuda), table, k_offsets=offsets, exact_k=exact[0],
            exact_v=exact[1], exact_block_table=exact_table, exact_first=4, exact_last=64,
        )  # fmt: skip
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
