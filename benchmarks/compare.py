"""`python -m benchmarks compare A.json B.json`: what became faster or slower, beyond noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measure import Result, Spread
from benchmarks.report import read_json

LEAST_CHANGE = 0.02  # smaller changes are never called one
SAME_GROUND = (
    *("gpu", "driver", "cuda", "power_limit", "mode"),
    *("cpu", "cores", "threads", "cpu_level", "torch", "compiler"),
)


@dataclass
class Change:
    """One row of both files."""

    name: str
    before: Spread
    after: Spread
    speedup: float
    """Above 1: B is faster."""
    ceiling_change: float | None
    """How much faster B's machine was at that moment, by its ceiling."""
    verdict: str
    """"faster", "slower", or "" where the difference is within the noise."""


def _own(result: Result) -> Spread:
    return next(iter(result.seconds.values()))


def compare_rows(before: list[Result], after: list[Result]) -> list[Change]:
    """Compare rows of the same name.

    A change is called one when the medians differ by more than 2 % and the quartile ranges do not meet.
    """
    old = {result.name: result for result in before}
    changes = []
    for result in after:
        if result.name not in old:
            continue
        a, b = _own(old[result.name]), _own(result)
        speedup = a.median / b.median
        apart = b.high < a.low or b.low > a.high
        verdict = ""
        if apart and abs(speedup - 1) > LEAST_CHANGE:
            verdict = "faster" if speedup > 1 else "slower"
        ceilings = (old[result.name].ceiling, result.ceiling)
        ground = ceilings[1] / ceilings[0] if all(ceilings) else None
        changes.append(Change(result.name, a, b, speedup, ground, verdict))
    return changes


def run(before: Path, after: Path) -> int:
    """Print the comparison; 1 where a row became slower, 2 for files that are no results, else 0."""
    console = Console()
    try:
        (old_environment, old), (new_environment, new) = read_json(before), read_json(after)
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    for key in SAME_GROUND:
        if old_environment.get(key) != new_environment.get(key):
            text = f"note: {key} differs: {old_environment.get(key)} and {new_environment.get(key)}"
            console.print(text, style="yellow", markup=False, highlight=False)
    changes = compare_rows(old, new)
    table = Table(title=escape(f"{before.name} -> {after.name}"), title_justify="left")
    table.add_column("row")
    for column in ("x as fast", "ceiling", ""):
        table.add_column(column, justify="right")
    styles = {"faster": "green", "slower": "bold red", "": "dim"}
    for change in changes:
        ceiling = "" if change.ceiling_change is None else f"x{change.ceiling_change:.2f}"
        style = styles[change.verdict]
        table.add_row(
            escape(change.name), f"[{style}]{change.speedup:.2f}[/]", ceiling, change.verdict or "within noise"
        )
    console.print(table)
    names = {
        "only in A": {r.name for r in old} - {r.name for r in new},
        "only in B": {r.name for r in new} - {r.name for r in old},
    }
    for label, missing in names.items():
        if missing:
            console.print(f"{label}: {', '.join(sorted(missing))}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(change.verdict == "slower" for change in changes) else 0
