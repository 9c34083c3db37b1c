"""Fair timing on a noisy machine: contenders take turns within one process, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


def _run(call: Call, repeats: int, device: str) -> float:
    """Seconds of one call, the mean over `repeats`."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def take_turns(
    contenders: Mapping[str, Call], *, seconds: float = 1.0, device: str = "cpu", sample: float = 2e-3
) -> dict[str, list[float]]:
    """Time every contender, round by round in turns, so that a slow moment of the machine hits all of them.

    Each is called once untimed first: it wakes the thread pool, faults pages in, fills caches.

    Args:
        contenders: name -> a call without arguments.
        seconds: how long to go on; at least five rounds are taken, at most 101.
        device: "cuda" waits for the GPU before and after every sample.
        sample: shorter calls are repeated until one sample takes about this many seconds.

    Returns:
        name -> seconds a call, one entry a round.
    """
    repeats = {}
    for name, call in contenders.items():
        call()
        repeats[name] = max(1, min(1000, round(sample / max(_run(call, 1, device), 1e-7))))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    for index in range(101):
        if index >= 5 and time.perf_counter() > end:
            break
        for name, call in contenders.items():
            taken[name].append(_run(call, repeats[name], device))
    return taken


def medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of every contender's rounds, in seconds a call."""
    return {name: statistics.median(values) for name, values in taken.items()}


def times_as_fast(taken: Mapping[str, list[float]], own: str, other: str) -> float:
    """How many times as fast `own` is as `other`: the median over the rounds, whose two calls shared a moment."""
    return statistics.median(theirs / ours for theirs, ours in zip(taken[other], taken[own], strict=True))


def format_seconds(value: float) -> str:
    """1.234e-5 -> "12.3 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return f"{value * 1e9:.0f} ns"


def format_bytes(value: float) -> str:
    """393216 -> "393 kB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
