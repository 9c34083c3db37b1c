"""Caches that get larger while in use, and padding that turns out longer."""

from __future__ import annotations

import pytest
import torch
from cache_model import check_pages, snapshot
from test_cache_steps import KINDS, pair

import flashq


@pytest.mark.parametrize("kind", KINDS)
def test_reserve_keeps_what_the_cache_holds(kind: str) -> None:
    both = pair(kind, num_pages=12, max_sequences=2)
    a, b = both.alloc(), both.alloc(5)
    both.extend([a, b], [70, 50])
    with pytest.raises(flashq.CacheFullError, match="pages"):
        both.cache.extend([a, b], [100, 100])
    both.cache.reserve(num_pages=40, max_sequences=4)
    assert both.cache.pages_in_use["pages"][1] == 40
    c, d = both.fork(a), both.alloc()
    both.extend([a, b, c, d], [100, 90, 1, 130])
    both.extend([d, c], [1, 1])
    check_pages(both.cache)
    both.cache.reserve(num_pages=2, max_sequences=1, max_length=1)  # less than there is: nothing changes
    assert both.cache.pages_in_use["pages"][1] == 40
    both.extend([a, b, c, d], [1, 1, 1, 1])


def test_reserve_ends_steps_made_before() -> None:
    cache = flashq.PagedKVCache(1, 1, 64, num_pages=2, page_size=16, dtype=torch.float32)
    step = cache.extend(cache.alloc(), 1)
    cache.reserve(num_pages=3)
    with pytest.raises(ValueError, match="step: expected the cache's latest"):
        step.append(0, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_a_reserve_that_memory_is_not_enough_for_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(kind, num_pages=12, max_sequences=2)
    cache = both.cache
    a, b = both.alloc(), both.alloc(5)
    both.extend([a, b], [70, 50])
    zeros, left = cache._zeros, 0

    def zeros_while_there_is_memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal left
        if left == 0:
            raise torch.OutOfMemoryError
        left -= 1
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(cache, "_zeros", zeros_while_there_is_memory)
    for enough in range(100):
        left = enough
        step = cache.lookup([a, b])
        sizes = (cache.num_pages, cache.max_sequences, cache.max_length, cache.nbytes, dict(cache.pages_in_use))
        before, tensors = snapshot(cache), [id(plane) for planes in cache._planes for plane in planes.values()]
        try:
            cache.reserve(num_pages=40, max_sequences=4)
        except torch.OutOfMemoryError:
            assert snapshot(cache) == before
            assert tensors == [id(plane) for planes in cache._planes for plane in planes.values()]
            assert sizes == (cache.num_pages, cache.max_sequences, cache.max_length, cache.nbytes, cache.pages_in_use)
            step.attend(0, torch.zeros(2, 4, 64))
            both.extend([a, b], [1, 1])
        else:
            break
    assert enough > 8
    assert (cache.num_pages, cache.max_sequences) == (40, 4)
    both.extend([a, b, both.fork(a)], [100, 100, 30])


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_padding_that_comes_in_parts(kind: str) -> None:
    """A sequence's first 20 tokens are padding; the first append knows of 12 only."""
    torch.manual_seed(0)
    outs = []
    k, v = torch.randn(2, 2, 45, 2, 64)
    q = torch.randn(2, 45, 4, 64)
    for parts in ((12, 33), (45,)):
        cache = pair(kind).cache
        sequence = cache.alloc(min(20, parts[0]))
        begin = 0
        for count in parts:
            cache.pad(sequence, min(20, begin + count))
            step, rows = cache.extend(sequence, count), slice(begin, begin + count)
            out = torch.stack([step.attend(i, q[i, rows], k[i, rows], v[i, rows])[0] for i in range(2)])
            begin += count
        outs.append(out[:, -1])
        with pytest.raises(ValueError, match="kv_start: expected at least 45"):
            cache.pad(sequence, 20)
        with pytest.raises(ValueError, match=r"kv_start: expected at least the present 20, .* got 19"):
            cache.pad(sequence, 19)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
