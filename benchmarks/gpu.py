"""Rows that are measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.gpu_ceilings import Ceilings
from benchmarks.gpu_graphs import capture, make_sets, time_alone, time_host, time_in_turns
from benchmarks.measure import Case, Result, summarize
from flashq.cli.timing import Call


@dataclass
class GpuSetup:
    """What a case runs on a GPU. Every contender can be captured in a graph."""

    contenders: Callable[[int], Mapping[str, Call]]
    """The contenders over input set i; sets share no inputs. The first contender is the one that the row is about."""
    work: float
    """Floating-point operations or bytes of one call: of bytes, what is read or written, each once."""
    footprint: float
    """Bytes of one input set and its outputs that a call touches."""
    ceiling: Literal["read", "copy", "matmul"] | None = None
    on_host: bool = True
    """Whether the time that a call keeps the host is of interest."""
    host_peers: Mapping[str, Call] = field(default_factory=dict)
    """Calls that are measured for the time they keep the host, and nothing else."""
    scale: Mapping[str, float] = field(default_factory=dict)
    """What the seconds of contenders that do other work are multiplied by, so that they stand for the row's work."""


def measure(case: Case[GpuSetup], seconds: float, ceilings: Ceilings, pause: float = 0.0) -> Result:
    """Measure one row for about `seconds`; the ceiling takes its turn in every round."""
    setup = case.prepare()
    sets = make_sets(setup.contenders, setup.footprint)
    graphs = {name: capture([contenders[name] for contenders in sets]) for name in sets[0]}
    work = 0.0
    if setup.ceiling is not None:
        ceiling = getattr(ceilings, setup.ceiling)
        work, graphs["ceiling"] = ceiling.work, capture([ceiling.call])
    taken = time_in_turns(graphs, seconds, pause)
    rates = [work / value for value in taken.pop("ceiling", [])]
    for name, factor in setup.scale.items():
        taken[name] = [value * factor for value in taken[name]]
    result = summarize(case, setup.work, taken, rates)
    own = next(iter(sets[0]))
    result.alone = time_alone(sets[0][own])
    if setup.on_host:
        result.host = {name: time_host(call) for name, call in {**sets[0], **setup.host_peers}.items()}
    return result
