"""Arguments of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import compare, cpu, probes, report
from benchmarks.environment import describe_environment
from benchmarks.measure import Case, Result, measure
from flashq.cli import machine
from flashq.cli.output import progress_bar
from flashq.cli.timing import format_seconds


def regex(text: str) -> str:
    """For argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure flashq.")
    commands = parser.add_subparsers(dest="command", required=True)
    on_cpu = commands.add_parser("cpu", help="every op on the CPU, beside torch and this machine's ceilings")
    on_cpu.add_argument("--quick", action="store_true", help="small shapes, seconds in all; the figures mean little")
    on_cpu.add_argument("--only", type=regex, metavar="REGEX", help="rows whose name it matches somewhere")
    on_cpu.add_argument("--isa", choices=machine.cpu_levels().available, help="another level of the CPU kernels")
    on_cpu.add_argument("--seconds", type=float, help="for every row (default 4, with --quick 0.2)")
    on_cpu.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    both = commands.add_parser("compare", help="two result files: what changed beyond noise")
    both.add_argument("before", type=Path, metavar="A.json")
    both.add_argument("after", type=Path, metavar="B.json")
    return parser


def measure_all(cases: list[Case], seconds: float, console: Console) -> list[Result]:
    """Measure the rows, with one line for each as it is done."""
    results = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            result = measure(case, seconds)
            results.append(result)
            progress.advance(task)
            share = f", {result.share:.0%} of the ceiling" if result.share else ""
            ratios = "".join(f", {ratio:.2f} x {peer}" for peer, ratio in result.ratios.items())
            median = format_seconds(next(iter(result.seconds.values())).median)
            line = f"{result.name}: {median}, {result.rate:.3g} {result.unit}{share}{ratios}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return results


def run_cpu(options: argparse.Namespace, console: Console) -> int:
    cases = [case for case in cpu.cases(options.quick) if re.search(options.only or "", case.name)]
    if not cases:
        console.print(
            f"benchmarks: --only: expected the name of a row, got {options.only!r}", style="red", markup=False
        )
        return 2
    try:
        probes.library()
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    with machine.cpu_level(options.isa) if options.isa else nullcontext(), torch.inference_mode():
        environment = describe_environment()
        console.print(report.describe(environment), markup=False, highlight=False, soft_wrap=True)
        if environment["load_average"] > 0.5 * environment["cores"]:
            console.print("note: other programs are running; the figures will be too low", style="yellow")
        results = measure_all(cases, options.seconds or (0.2 if options.quick else 4.0), console)
    written = report.write_all(options.out, report.file_stem(environment, "cpu"), environment, results)
    console.print("written: " + ", ".join(map(str, written)), markup=False, highlight=False, soft_wrap=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if options.command == "compare":
        return compare.run(options.before, options.after)
    return run_cpu(options, Console())


if __name__ == "__main__":
    sys.exit(main())
