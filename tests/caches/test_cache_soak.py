"""Sequences come, fork, roll back and go, thousands of times: results stay right, pages and memory do not leak."""

from __future__ import annotations

import random
import resource
from typing import Any

import pytest
import torch
from cache_model import check_pages
from test_cache_steps import pair

import flashq


def used_kib(device: torch.device) -> int:
    """Memory in use on the GPU, or the most that the process had."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(kind: str, steps: int, checks: int, **options: Any) -> None:
    """A cache that is nearly always full, as one that serves. Compares with the model at `checks` of the steps."""
    both = pair(kind, num_pages=60, max_sequences=8, max_length=320, **options)
    cache, nbytes, full, rng = both.cache, both.cache.nbytes, 0, random.Random(0)
    high_water = 0
    for i in range(steps):
        sequences = cache.sequences
        chance = rng.random()
        if len(sequences) < 3 or (chance < 0.06 and len(sequences) < 8):
            sequences = [both.alloc(rng.choice([0, 0, 0, 9]))]
        elif chance < 0.12 and len(sequences) < 8:
            both.fork(rng.choice(sequences))
        elif chance < 0.2:
            sequence = rng.choice(sequences)
            length = max(0, cache.length(sequence) - rng.randrange(17))
            if both.model.can_truncate(sequence, length):  # twice in a row, it may be more than the slack
                both.truncate(sequence, length)
        elif chance < 0.25:
            both.free(rng.choice(sequences))
        batch = rng.sample(cache.sequences, rng.randint(1, len(cache.sequences)))
        counts = [rng.choice([1, 1, 1, 1, 1, 4, rng.randint(0, 60)]) for _ in batch]
        try:
            both.extend(batch, counts, compare=i % (steps // checks) == 0)
        except flashq.CacheFullError:
            full += 1
            both.free(max(batch, key=cache.length))
        if i % 50 == 0:
            check_pages(cache)
        if i == steps // 4:
            high_water = used_kib(cache.device)
    grown = used_kib(cache.device) - high_water
    assert cache.nbytes == nbytes
    assert grown < 32 << 10, f"{grown} KiB more at the end than after a quarter of the steps"
    assert full > steps // 200
    for sequence in cache.sequences:
        both.free(sequence)
    check_pages(cache)
    assert all(used == 0 for used, _ in cache.pages_in_use.values())


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_soak(kind: str) -> None:
    soak(kind, 400, 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_long_soak(kind: str) -> None:
    soak(kind, 10_000, 100)
