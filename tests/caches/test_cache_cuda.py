"""Caches on a GPU: the bytes that the same calls give on the CPU, and steps as CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch
from cache_model import Pair, check_pages, random_inputs
from test_cache_steps import make

import flashq

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("kind", ["16bit", "tbq4", "tbq4 offsets"])
def test_the_same_calls_write_the_same_bytes(kind: str) -> None:
    caches = [make(kind, device=device, dtype=torch.bfloat16) for device in ("cpu", "cuda")]
    rng = random.Random(1)
    for cache in caches:
        cache.alloc(), cache.alloc(7)
    for i in range(60):
        sequence, chance = rng.choice(caches[0].sequences), rng.random()
        batch = rng.sample(caches[0].sequences, rng.randint(1, len(caches[0].sequences)))
        counts = [rng.choice([1, 1, 2, 70]) for _ in batch]
        for cache in caches:
            if chance < 0.1 and len(cache.sequences) < 5:
                cache.fork(sequence)
            elif chance < 0.25:
                cache.truncate(sequence, max(0, cache.length(sequence) - 9))
            try:
                step = cache.extend(batch, counts)
            except flashq.CacheFullError:
                cache.truncate(batch[0], 0)
                continue
            _, k, v = random_inputs(cache, step.tokens, i)
            for layer in range(cache.num_layers):
                step.append(layer, k[layer].to(cache.device), v[layer].to(cache.device))
        for ours, theirs in zip(caches[0]._planes, caches[1]._planes, strict=True):
            for name, plane in ours.items():
                assert torch.equal(plane.view(torch.uint8), theirs[name].cpu().view(torch.uint8)), name
    check_pages(caches[1])


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_a_captured_step_serves_the_next_ones(kind: str) -> None:
    """Pages are taken, and shared ones copied, outside of the graph; other sequences come between replays."""
    plain, captured = (make(kind, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for cache in (plain, captured):
        for count in (30, 15, 50):
            step = cache.extend(cache.alloc(), count)
            _, k, v = (x.cuda() for x in random_inputs(cache, count, count))
            for layer in range(2):
                step.append(layer, k[layer], v[layer])
    buffers = [x.cuda() for x in random_inputs(captured, 2, 0)]
    step = captured.extend([0, 1])
    graph = torch.cuda.CUDAGraph()
    plain_step = plain.extend([0, 1])
    for layer in range(2):  # torch asks for a first call outside of the capture: here on the other cache
        plain_step.append(layer, buffers[1][layer], buffers[2][layer])
    with torch.cuda.graph(graph):
        for layer in range(2):
            step.append(layer, buffers[1][layer], buffers[2][layer])
    graph.replay()
    for i in range(1, 40):
        batch = [i % 3, (i + 1) % 3]
        if i == 15:
            plain.fork(2), captured.fork(2)
        for x, new in zip(buffers, random_inputs(captured, 2, i), strict=True):
            x.copy_(new)
        step = plain.extend(batch)
        for layer in range(2):
            step.append(layer, buffers[1][layer], buffers[2][layer])
        captured.extend(batch)
        graph.replay()
    for ours, theirs in zip(plain._planes, captured._planes, strict=True):
        for name, plane in ours.items():
            assert torch.equal(plane.view(torch.uint8), theirs[name].view(torch.uint8)), name


def test_attention_over_a_16_bit_cache() -> None:
    """Against the model: what bf16 rounds away is the whole difference."""

    class OnGpu(Pair):
        def extend(self, sequences: list[int], counts: list[int]) -> None:
            step = self.cache.extend(sequences, counts)
            self.seed += 1
            inputs = random_inputs(self.cache, step.tokens, self.seed)
            q, k, v = (x.cuda() for x in inputs)
            got = torch.stack([step.attend(layer, q[layer], k[layer], v[layer])[0] for layer in range(2)])
            self._compare(got.cpu(), self.model.extend(sequences, counts, *inputs))

    both = OnGpu(make("16bit", device="cuda", dtype=torch.bfloat16), 1e-2)
    a, b = both.alloc(), both.alloc(5)
    both.extend([a, b], [120, 60])
    for _ in range(20):
        both.extend([b, a], [1, 1])
    c = both.fork(a)
    both.truncate(b, 70)
    both.extend([c, a, b], [3, 1, 2])
    check_pages(both.cache)
