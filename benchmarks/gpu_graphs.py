"""Fair timing on a GPU: contenders in CUDA graphs that take turns, over inputs that the L2 cannot hold."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmarks import gpu_probes
from flashq.cli.timing import Call

S = TypeVar("S")

L2_TIMES = 4  # a rotation of inputs is larger than so many L2 caches
SETS_SHARE = 0.5  # of the GPU's memory, for the input sets of a row: a call may touch little of what its set holds
GRAPH_SECONDS = 1e-3  # shorter replays hold more calls: an event has a resolution of 0.5 us
MIN_ROUNDS, MAX_ROUNDS = 15, 301
WINDOW = 5  # rounds in the queue at once: the GPU never waits for the host
WARM_SECONDS = 0.05
HOST_BATCH = 30  # calls; the queue holds about a thousand launches, and an eager contender makes dozens a call


def l2_bytes() -> int:
    """The L2 of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def rotation(footprint: float, l2_bytes: int) -> int:
    """How many input sets are larger than L2_TIMES L2 caches together; 1 where there is nothing to rotate."""
    return 1 if footprint <= 0 else math.floor(L2_TIMES * l2_bytes / footprint) + 1


def input_sets(footprint: float) -> int:
    """`rotation` on the current GPU."""
    return rotation(footprint, l2_bytes())


def most_sets(held: int, room: float) -> int:
    """How many input sets that hold `held` bytes each fit in `room` bytes; at least 1."""
    return max(1, math.floor(room / held)) if held > 0 else sys.maxsize


def make_sets(make: Callable[[int], S], footprint: float) -> list[S]:
    """make(i) for as many input sets as rotate through the L2, as far as they fit in SETS_SHARE of the GPU's memory.

    Args:
        make: allocates and returns input set i.
        footprint: bytes of a set that a call touches.
    """
    before = torch.cuda.memory_allocated()
    room = SETS_SHARE * (torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory - before)
    first = make(0)
    count = min(input_sets(footprint), most_sets(torch.cuda.memory_allocated() - before, room))
    return [first, *(make(index) for index in range(1, count))]


def random_normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Inputs of a contender: the same for a seed in every run."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator, dtype=dtype)


def random_permutation(count: int) -> Tensor:
    """int64, the same in every run."""
    return torch.randperm(count, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


class Graph(NamedTuple):
    """A captured run of calls."""

    graph: torch.cuda.CUDAGraph
    calls: int


def _elapsed(run: Call) -> float:
    """Seconds of one run, with the host out of the way."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gpu_probes.spin(1e-4)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def _capture(calls: Sequence[Call], repeats: int = 1) -> Graph:
    graph = torch.cuda.CUDAGraph()
    # The outputs of one rotation stay alive, so that calls do not write to the same few bytes of the L2.
    outputs: deque[object] = deque(maxlen=len(calls))
    # What torch allocates for the capture itself must not become an inference tensor, which no later capture could use.
    with torch.inference_mode(False), torch.cuda.graph(graph), torch.inference_mode():
        for call in itertools.chain.from_iterable(itertools.repeat(calls, repeats)):
            outputs.append(call())
    return Graph(graph, len(calls) * repeats)


def capture(calls: Sequence[Call], least_seconds: float = GRAPH_SECONDS) -> Graph:
    """One graph of all calls, so often that a replay takes `least_seconds`.

    The first call runs once before: it loads kernels, creates handles, chooses algorithms.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = _capture(calls)
    graph.graph.replay()
    repeats = math.ceil(least_seconds / max(_elapsed(graph.graph.replay), 1e-6))
    return graph if repeats == 1 else _capture(calls, repeats)


def time_in_turns(graphs: Mapping[str, Graph], seconds: float, pause: float = 0.0) -> dict[str, list[float]]:
    """Replay the graphs in turns, for about `seconds` and at least MIN_ROUNDS rounds.

    Every round has an order of its own: where all follow each other in one order, who comes after a contender that
    draws little power finds the GPU at a higher clock.

    Args:
        graphs: contender -> graph.
        pause: seconds that the GPU idles before every replay; 0: none at all, the replays stand back to back.

    Returns:
        name -> seconds a call, one entry a round.
    """
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    shuffle = random.Random(0)
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        for graph in graphs.values():
            graph.graph.replay()
        torch.cuda.synchronize()
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < end):
        marks = []
        for _ in range(WINDOW):
            for name in shuffle.sample(list(graphs), len(graphs)):
                if pause > 0:
                    torch.cuda.synchronize()
                    time.sleep(pause)
                if pause > 0 or not marks:
                    gpu_probes.spin(1e-4)  # the first replay is queued before its clock starts
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs[name].graph.replay()
                stop.record()
                marks.append((name, start, stop))
        torch.cuda.synchronize()
        for name, start, stop in marks:
            taken[name].append(start.elapsed_time(stop) * 1e-3 / graphs[name].calls)
        rounds += WINDOW
    return taken


def time_alone(call: Call, rounds: int = MIN_ROUNDS) -> float:
    """Seconds of a graph of one call when nothing runs beside it and the L2 holds other data: what one step waits.

    An empty kernel takes a few microseconds here: the start of a graph, between two events.
    """
    graph = _capture([call])
    other = torch.empty(L2_TIMES * l2_bytes(), device="cuda", dtype=torch.uint8).random_()
    sink = torch.empty(16, device="cuda", dtype=torch.uint8)
    marks = []
    for _ in range(rounds):
        gpu_probes.read(other, sink)  # and while it runs, the host queues the rest
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.graph.replay()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks) * 1e-3


def time_host(call: Call, rounds: int = MIN_ROUNDS) -> float:
    """Seconds that a call keeps the host while the GPU's queue has room."""
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_BATCH):
            call()
        taken.append((time.perf_counter() - start) / HOST_BATCH)
    torch.cuda.synchronize()
    return statistics.median(taken)
