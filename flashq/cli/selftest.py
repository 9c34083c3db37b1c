"""`python -m flashq selftest`: every op against its eager definition, at every CPU level here and on CUDA."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flashq.cli import machine
from flashq.cli.output import progress_bar
from flashq.cli.selftest_cases import CASES, Case, Comparison

PASSED, FAILED, ABSENT = "passed", "FAILED", "not on this device"


@dataclass
class Result:
    """What came of one op's case."""

    state: str
    comparisons: int = 0
    detail: str = ""
    """The worst comparison, the exception, or why the op was not run."""


def run_case(case: Case, device: str) -> Result:
    """Run one case; whatever it raises is a failure, but for the refusal of an op that the device does not have."""
    worst: Comparison | None = None
    failures: list[str] = []
    count = 0
    try:
        with torch.inference_mode():
            for comparison in case(device):
                count += 1
                if not comparison.passed:
                    failures.append(f"{comparison.what}: {comparison.value:.3g}, at most {comparison.bound:.3g}")
                if worst is None or comparison.value * worst.bound > worst.value * comparison.bound:
                    worst = comparison
    except Exception as error:
        if device == "cuda" and "no CUDA kernel" in str(error):
            return Result(ABSENT)
        return Result(FAILED, count, f"{type(error).__name__}: {error}".splitlines()[0])
    if failures or worst is None:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return Result(FAILED, count, failures[0] + more if failures else "nothing was compared")
    return Result(PASSED, count, f"{worst.what}: {worst.value:.2g} of {worst.bound:.2g}" if worst.bound else "exact")


def run_cases(device: str) -> Iterator[tuple[str, Result]]:
    """Run every case on a device, in the order of the table."""
    for op, case in CASES.items():
        yield op, run_case(case, device)


def make_table(columns: Mapping[str, Mapping[str, Result]]) -> Table:
    """Ops down, devices and levels across; the cell says how much was compared, and the share of the bound used."""
    table = Table(title="flashq self-test: every op against flashq.reference", title_justify="left")
    table.add_column("op")
    for name in columns:
        table.add_column(name)
    styles = {PASSED: "green", FAILED: "bold red", ABSENT: "dim"}
    for op in CASES:
        cells = []
        for results in columns.values():
            result = results[op]
            text = result.state if result.state == ABSENT else f"{result.state}, {result.comparisons} comparisons"
            cells.append(f"[{styles[result.state]}]{text}[/]")
        table.add_row(op, *cells)
    return table


def run(json_path: Path | None = None) -> int:
    """Run everything and print it; 1 where anything failed, else 0."""
    console = Console()
    start = time.perf_counter()
    gpu = machine.find_gpu()
    levels = machine.cpu_levels().available
    places = [(f"cpu, {level}", "cpu", machine.cpu_level(level)) for level in levels]
    if gpu and not gpu.problem:
        places.append(("cuda", "cuda", nullcontext()))
    columns: dict[str, dict[str, Result]] = {}
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(CASES) * len(places))
        for name, device, selected in places:
            columns[name] = {}
            with selected:
                for op, result in run_cases(device):
                    progress.update(task, advance=1, description=f"{name}: {op}")
                    columns[name][op] = result
    console.print(make_table(columns))
    failed = [
        f"{op} on {name}: {result.detail}"
        for name, results in columns.items()
        for op, result in results.items()
        if result.state == FAILED
    ]
    for line in failed:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - start
    verdict = f"{len(failed)} FAILED" if failed else "everything passed"
    console.print(f"{verdict} in {seconds:.1f} s ({machine.describe_gpu(gpu)})", highlight=False, soft_wrap=True)
    if json_path is not None:
        plain = {name: {op: asdict(result) for op, result in results.items()} for name, results in columns.items()}
        json_path.write_text(json.dumps(plain, indent=1) + "\n")
    return 1 if failed else 0
