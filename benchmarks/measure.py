"""One row of a benchmark: contenders and a ceiling in turns, then medians and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from flashq.cli.timing import Call, take_turns, times_as_fast

UNIT_SIZE = {"GFLOP/s": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "launches/s": 1.0}


@dataclass
class Setup:
    """What a case runs. The first contender is the one that the row is about."""

    contenders: dict[str, Call]
    work: float
    """Floating-point operations, bytes or values of one call."""
    ceiling: Callable[[], float] | None = None
    """The most of `work` a second that this machine can do, measured anew at every call."""


SetupType = TypeVar("SetupType")


@dataclass
class Case(Generic[SetupType]):
    """A row to be measured; `prepare` allocates only when it is its turn."""

    suite: str
    name: str
    unit: str
    """A key of UNIT_SIZE."""
    prepare: Callable[[], SetupType]


@dataclass
class Spread:
    """Seconds a call over the rounds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    rounds: int


@dataclass
class Result:
    """One measured row."""

    suite: str
    name: str
    unit: str
    rate: float
    """Work a second of the first contender, in `unit`."""
    ceiling: float | None
    """The same of the ceiling, None without one."""
    ratios: dict[str, float]
    """How many times as fast the first contender is as each other one: the median over the rounds."""
    seconds: dict[str, Spread] = field(default_factory=dict)
    alone: float | None = None
    """On GPUs: seconds of one call of the first contender with nothing before it and its inputs out of the L2."""
    host: dict[str, float] = field(default_factory=dict)
    """On GPUs: seconds that a call of each contender keeps the host."""

    @property
    def share(self) -> float | None:
        return None if self.ceiling is None else self.rate / self.ceiling

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the data are no row's, or hold a time or a rate that nothing can have.
        """
        seconds = {name: Spread(**spread) for name, spread in dict(data["seconds"]).items()}
        result = Result(**{**data, "seconds": seconds})
        measured = [x for spread in seconds.values() for x in (spread.median, spread.low, spread.high)]
        measured += [result.rate] if result.ceiling is None else [result.rate, result.ceiling]
        if not isinstance(result.name, str) or not seconds or not all(0 < x < math.inf for x in measured):
            raise ValueError(f"a row without a name, a time or a rate: {result.name!r}")
        return result


def spread_of(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def summarize(case: Case[Any], work: float, taken: Mapping[str, Sequence[float]], ceilings: Sequence[float]) -> Result:
    """The row of what was measured.

    Args:
        work: floating-point operations or bytes of one call.
        taken: contender -> seconds a call, one entry a round; the first is the one that the row is about.
        ceilings: the most of `work` a second, one entry a round, or nothing.
    """
    own, *others = taken
    return Result(
        suite=case.suite,
        name=case.name,
        unit=case.unit,
        rate=work / statistics.median(taken[own]) / UNIT_SIZE[case.unit],
        ceiling=statistics.median(ceilings) / UNIT_SIZE[case.unit] if any(ceilings) else None,
        ratios={other: times_as_fast(taken, own, other) for other in others},
        seconds={name: spread_of(values) for name, values in taken.items()},
    )


def measure(case: Case[Setup], seconds: float) -> Result:
    """Measure one row of the CPU for about `seconds`; the ceiling takes its turn in every round."""
    setup = case.prepare()
    ceilings: list[float] = []
    calls = dict(setup.contenders)
    ceiling = setup.ceiling
    if ceiling is not None:
        calls["ceiling"] = lambda: ceilings.append(ceiling())
    taken = take_turns(calls, seconds=seconds, sample=5e-3)
    taken.pop("ceiling", None)
    return summarize(case, setup.work, taken, ceilings)
