"""Prompts in a 16-bit cache: attended as they come, by the op for many queries, and stored on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_model import random_inputs
from test_cache_steps import make
from torch import Tensor

from flashq import reference
from flashq.caches import PagedCache, PagedKVCache, Step


def attend(step: Step, inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Out and lse of every layer, on the CPU."""
    device = step.chunks[0].seqlens.device
    q, k, v = (x.to(device) for x in inputs)
    results = [step.attend(layer, q[layer], k[layer], v[layer], **options) for layer in range(len(q))]
    return [(out.cpu(), lse.cpu()) for out, lse in results]


def check(
    cache: PagedCache, results: list[tuple[Tensor, Tensor]], inputs: tuple[Tensor, Tensor, Tensor], counts: list[int],
    starts: list[int], **options: Any,
) -> None:  # fmt: skip
    """Against eager attention over each new sequence, whose first `starts` tokens are padding."""
    tolerance = 1e-5 if cache.dtype == torch.float32 else 1e-2
    q, k, v = inputs
    begin = 0
    for count, start in zip(counts, starts, strict=True):
        own, seen = slice(begin, begin + count), slice(begin + min(start, count), begin + count)
        for layer, (out, lse) in enumerate(results):
            truth, truth_lse = reference.prefill(
                q[layer, None, seen], k[layer, None, seen], v[layer, None, seen],
                causal=True, window_left=cache.window_left[layer], dtype=torch.float64, **options,
            )  # fmt: skip
            torch.testing.assert_close(out[seen], truth[0].to(out.dtype), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse[:, seen], truth_lse[0].float(), rtol=0, atol=tolerance)
            padding = slice(own.start, seen.start)
            assert (out[padding] == 0).all()
            nothing = options.get("sinks", torch.full((out.shape[1],), float("-inf")))
            assert torch.equal(lse[:, padding], nothing[:, None].expand(-1, padding.stop - padding.start))
        begin += count


@pytest.fixture
def cache(device: torch.device) -> PagedCache:
    return make("16bit", device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the prompt was read from pages")

    monkeypatch.setattr(PagedKVCache, "_attend", refuse)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 4.0, "sinks": torch.tensor([0.5, 2.0, -1.0, 0.0])}])
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 20, 40], [17, 0, 30]])
@pytest.mark.usefixtures("no_pages")
def test_prompts_of_new_sequences(cache: PagedCache, starts: list[int], options: dict[str, Any]) -> None:
    """In three chunks; the second has windows; one sequence may be all padding so far."""
    counts = [130, 60, 30]
    inputs = random_inputs(cache, sum(counts), 0)
    for x in inputs:
        begin = 0
        for count, start in zip(counts, starts, strict=True):
            x[:, begin : begin + min(start, count)] = float("nan")
            begin += count
    step = cache.extend([cache.alloc(start) for start in starts], counts)
    assert len(step.chunks) == 3
    moved = {name: x.to(cache.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    results = attend(step, inputs, **moved)
    check(cache, results, inputs, counts, starts, **options)


@pytest.mark.usefixtures("no_pages")
def test_batched_prompts_are_packed_ones(cache: PagedCache) -> None:
    starts = [0, 9]
    inputs = random_inputs(cache, 60, 1)
    step = cache.extend([cache.alloc(start) for start in starts], 30)
    results = attend(step, tuple(x.unflatten(1, (2, 30)) for x in inputs))
    assert results[0][0].shape == (2, 30, 4, 64)
    assert results[0][1].shape == (2, 4, 30)
    packed = [(out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) for out, lse in results]
    check(cache, packed, inputs, [30, 30], starts)


def test_a_prompt_is_stored(cache: PagedCache) -> None:
    """The next token sees it; so does a fork, and what an append of many tokens after it reads comes from pages."""
    inputs = random_inputs(cache, 130, 2)
    parts = [tuple(x[:, rows] for x in inputs) for rows in (slice(0, 90), slice(90, 91), slice(91, 130))]
    a = cache.alloc()
    results = [attend(cache.extend(a, part[0].shape[1]), part) for part in parts]
    whole = [
        (torch.cat([out for out, _ in layer]), torch.cat([lse for _, lse in layer], 1))
        for layer in zip(*results, strict=True)
    ]
    check(cache, whole, inputs, [130], [0])


@pytest.mark.parametrize(
    ("counts", "options"),
    [([40, 1], {}), ([16, 16], {}), ([40, 40], {"kv_chunk": 256}), ([40, 40], {"out_dtype": torch.float32})],
)
def test_what_else_is_read_from_pages(
    counts: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that have tokens; steps that a graph may hold; bits that must not depend on other sequences."""
    cache = make("16bit", dtype=torch.bfloat16)
    a, b = cache.alloc(), cache.alloc()
    if counts == [40, 1]:
        attend(cache.extend(b, 20), random_inputs(cache, 20, 3))
    read = []
    paged = PagedKVCache._attend
    monkeypatch.setattr(PagedKVCache, "_attend", lambda *args, **kw: read.append(1) or paged(*args, **kw))
    inputs = random_inputs(cache, sum(counts), 4)
    results = attend(cache.extend([a, b], counts), inputs, **options)
    assert len(read) == cache.num_layers
    if counts[0] == counts[1]:
        check(cache, results, inputs, counts, [0, 0])
