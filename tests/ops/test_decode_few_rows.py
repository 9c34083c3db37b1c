"""The CPU kernel for few rows (query tokens times group up to 24): what its way through the cache could get wrong.

It walks unaligned 64-key tiles inside a split, rows in groups of 4, 2 and 1, and deals out KV heads among threads.
"""

from __future__ import annotations

import pytest
import torch

import flashq
from flashq import reference

pytestmark = pytest.mark.usefixtures("isa")  # every instruction set of this machine


def cache(length: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v (1, length + 70, kv_heads, dim), NaN past the length."""
    shape = (1, length + 70, kv_heads, dim)
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    k[:, length:], v[:, length:] = float("nan"), float("nan")
    return k, v


@pytest.mark.parametrize("length", [511, 513, 514, 1026])
def test_window_across_a_split_boundary(length: int) -> None:
    """Query tokens on both sides of the boundary at 512: no row may take in keys that belong to the next split."""
    torch.manual_seed(length)
    k, v = cache(length, 2, 40, torch.float32)
    q = torch.randn(1, 4, 6, 40)
    lengths = torch.tensor([length])
    out, lse = flashq.decode(q, k, v, lengths, window_left=3)
    truth, true_lse = reference.decode(q, k, v, lengths, window_left=3, dtype=torch.float64)
    torch.testing.assert_close(out, truth.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, true_lse.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", range(1, 26))
def test_every_row_of_a_group_sees_its_own_keys(group: int, dtype: torch.dtype) -> None:
    """One dominant key for each head: its value comes back, whatever rows share the tile, and the last tile's tail."""
    torch.manual_seed(group)
    length, dim = 131, 72
    k, v = cache(length, 1, dim, dtype)
    k[:, :length] = 0
    heads, places = torch.arange(group), torch.randperm(length)[:group]
    k[0, places, 0, heads] = 64
    q = torch.zeros(1, 1, group, dim, dtype=dtype)
    q[0, 0, heads, heads] = 64
    out, _ = flashq.decode(q, k, v, torch.tensor([length]), scale=1.0)
    assert torch.equal(out[0, 0], v[0, places, 0])


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 127])
@pytest.mark.parametrize("count", [1, 2, 31, 64, 65])
def test_tiles_start_at_the_first_visible_key(start: int, count: int) -> None:
    """NaN on both sides of the visible keys, in K and V."""
    torch.manual_seed(start)
    k, v = cache(start + count, 3, 24, torch.bfloat16)
    k[:, :start], v[:, :start] = float("nan"), float("nan")
    q = torch.randn(1, 1, 9, 24).bfloat16()
    index = {"seqlens": torch.tensor([start + count]), "kv_start": torch.tensor([start])}
    out, lse = flashq.decode(q, k, v, **index, out_dtype=torch.float32)
    truth, true_lse = reference.decode(q, k, v, **index, dtype=torch.float64)
    torch.testing.assert_close(out, truth.float(), atol=1e-2, rtol=0)
    torch.testing.assert_close(lse, true_lse.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [40, 700, 3000])
def test_bits_do_not_depend_on_how_heads_are_dealt_out(length: int) -> None:
    """Threads and batch mates change how many KV heads a unit takes, and nothing else."""
    torch.manual_seed(0)
    k, v = cache(length, 8, 64, torch.bfloat16)
    k, v = k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1)
    q = torch.randn(1, 1, 24, 64).bfloat16().repeat(4, 1, 1, 1)
    torch.set_num_threads(1)
    together = flashq.decode(q, k, v, torch.full((4,), length), kv_chunk=256)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        alone = flashq.decode(q[:1], k[:1], v[:1], torch.tensor([length]), kv_chunk=256)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[3])
