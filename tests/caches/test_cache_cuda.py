"""Caches on a GPU: the bytes that the same calls give on the CPU, and steps as CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cache_model import check_pages, random_inputs, snapshot
from cases import ON_CUDA
from test_cache_soak import soak
from test_cache_steps import make, pair

import flashq
from flashq.caches import Step

pytestmark = pytest.mark.cuda

ATTENDS = ["16bit", "tbq4"] if "tbq4_attention" in ON_CUDA else ["16bit"]


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

    def run(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """All layers; what they give where CUDA has the attention of this kind."""
        results: list[torch.Tensor] = []
        for layer in range(2):
            if kind in ATTENDS:
                results += step.attend(layer, q[layer], k[layer], v[layer])
            else:
                step.append(layer, k[layer], v[layer])
        return results

    for cache in (plain, captured):
        for count in (30, 15, 50):
            run(cache.extend(cache.alloc(), count), *(x.cuda() for x in random_inputs(cache, count, count)))
    buffers = [x.cuda() for x in random_inputs(captured, 2, 0)]
    run(plain.extend([0, 1]), *buffers)  # torch asks for a first call outside of the capture: here on the other cache
    step, graph = captured.extend([0, 1]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(step, *buffers)
    graph.replay()
    for i in range(1, 40):
        batch = [i % 3, (i + 1) % 3]
        if i == 15:
            plain.fork(2), captured.fork(2)
        for x, new in zip(buffers, random_inputs(captured, 2, i), strict=True):
            x.copy_(new)
        expected = run(plain.extend(batch), *buffers)
        captured.extend(batch)
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
    for ours, theirs in zip(plain._planes, captured._planes, strict=True):
        for name, plane in ours.items():
            assert torch.equal(plane.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.fixture
def syncs_are_errors() -> Iterator[Callable[[bool], None]]:
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_the_host_never_waits(kind: str, has_sinks: bool, syncs_are_errors: Callable[[bool], None]) -> None:
    """Neither for prompts, which are cut and padded here, nor for copied pages, nor for page offsets."""
    cache = make(kind, device="cuda", dtype=torch.bfloat16)
    inputs = [x.cuda() for x in random_inputs(cache, 150, 0)]
    sinks = torch.zeros(4, device="cuda") if has_sinks else None
    a, b = cache.alloc(), cache.alloc(20)
    syncs_are_errors(True)
    for counts in ([90, 60], [1, 1], [0, 2]):
        if counts == [0, 2]:
            cache.fork(b)
        step = cache.extend([a, b], counts)
        for layer in range(2):
            q, k, v = (x[layer, : step.tokens] for x in inputs)
            if kind in ATTENDS:
                step.attend(layer, q, k, v, sinks=sinks)
            else:
                step.append(layer, k, v)
    cache.truncate(b, 50)
    cache.free(a)
    syncs_are_errors(False)
    check_pages(cache)


@pytest.mark.parametrize("kind", ATTENDS)
def test_attention_over_a_cache(kind: str) -> None:
    """Against the model: what bf16 rounds away is the whole difference."""
    both = pair(kind, device="cuda", dtype=torch.bfloat16)
    a, b = both.alloc(), both.alloc(5)
    both.extend([a, b], [120, 60])
    for _ in range(20):
        both.extend([b, a], [1, 1])
    c = both.fork(a)
    both.truncate(b, 70)
    both.extend([c, a, b], [3, 1, 2])
    both.lookup([a, c])
    check_pages(both.cache)


@pytest.mark.parametrize("kind", ATTENDS)
def test_soak(kind: str) -> None:
    soak(kind, 150, 10, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_files_go_from_one_device_to_another(kind: str, devices: tuple[str, str], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    ours, theirs = (make(kind, device=device, dtype=torch.bfloat16) for device in devices)
    for count in (90, 45):
        step = ours.extend(ours.alloc(), count)
        _, k, v = (x.to(ours.device) for x in random_inputs(ours, count, count))
        for layer in range(2):
            step.append(layer, k[layer], v[layer])
    ours.save(tmp_path / "first")
    loaded = theirs.load(tmp_path / "first")
    theirs.save(tmp_path / "second", loaded)
    headers = [safetensors.safe_open(tmp_path / name, framework="pt").metadata() for name in ("first", "second")]
    assert headers[0] == headers[1]  # the checksum of all tensors is in there
    check_pages(theirs)


def test_a_reserve_that_memory_is_not_enough_for_changes_nothing() -> None:
    both = pair("16bit", device="cuda", dtype=torch.bfloat16)
    a = both.alloc()
    both.extend([a], [50])
    before, nbytes = snapshot(both.cache), both.cache.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        both.cache.reserve(num_pages=1 << 28)
    assert (snapshot(both.cache), both.cache.nbytes, both.cache.num_pages) == (before, nbytes, 40)
    both.extend([a], [50])
