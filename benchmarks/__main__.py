"""Arguments of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import (
    compare,
    cpu,
    decode,
    gpu,
    gpu_ceilings,
    gpu_peers,
    gpu_probes,
    prefill,
    probes,
    report,
    small_ops,
    tbq4_decode,
)
from benchmarks.environment import describe_environment, describe_gpu
from benchmarks.measure import Case, Result, measure
from flashq.cli import machine
from flashq.cli.output import progress_bar
from flashq.cli.timing import format_seconds

RESULTS = Path(__file__).parent / "results"
COOL_PAUSE = 0.05  # seconds; after it the clock is the GPU's highest
# GPU command -> what it measures, its rows.
GPU_COMMANDS: dict[str, tuple[str, Callable[[bool], list[Case[gpu.GpuSetup]]]]] = {
    "cuda": ("on the GPU: the TBQ4 codec, appends and merge, beside copies", small_ops.cases),
    "decode": ("on the GPU: few queries over long caches, beside reads, SDPA and FlashAttention-3", decode.cases),
    "tbq4": ("on the GPU: attention over a 4-bit cache, beside 16-bit caches", tbq4_decode.cases),
    "prefill": ("on the GPU: attention of many queries, beside torch's SDPA and FlashAttention-3", prefill.cases),
}


def regex(text: str) -> str:
    """For argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error
    return text


def duration(text: str) -> float:
    """For argparse: a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure flashq.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--quick", action="store_true", help="small shapes, seconds in all; the figures mean little")
    shared.add_argument("--only", type=regex, metavar="REGEX", help="rows whose name it matches somewhere")
    shared.add_argument("--seconds", type=duration, help="for every row (default: 4 on the CPU, 1 on a GPU)")
    shared.add_argument("--out", type=Path, metavar="FOLDER", help="of the result files (default: benchmarks/results)")
    shared.add_argument(
        "--label",
        help="last word of the result files' names (default: none; in benchmarks/results quick or part with --quick "
        "or --only, so that they do not replace a whole run's)",
    )
    on_cpu = commands.add_parser("cpu", parents=[shared], help="every op, beside torch and this machine's ceilings")
    on_cpu.add_argument("--isa", choices=machine.cpu_levels().available, help="another level of the CPU kernels")
    for name, (text, _) in GPU_COMMANDS.items():
        on_gpu = commands.add_parser(name, parents=[shared], help=text)
        on_gpu.add_argument("--cool", action="store_true", help=f"pause {COOL_PAUSE} s before every replay")
    both = commands.add_parser("compare", help="two result files: what changed beyond noise")
    both.add_argument("before", type=Path, metavar="A.json")
    both.add_argument("after", type=Path, metavar="B.json")
    return parser


def _refuse(console: Console, text: str) -> int:
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def _line(result: Result) -> str:
    share = f", {result.share:.0%} of the ceiling" if result.share else ""
    ratios = "".join(f", {ratio:.2f} x {peer}" for peer, ratio in result.ratios.items())
    own, spread = next(iter(result.seconds.items()))
    alone = f", alone {format_seconds(result.alone)}" if result.alone else ""
    host = f", host {format_seconds(result.host[own])}" if result.host else ""
    median = format_seconds(spread.median)
    return f"{result.name}: {median}, {result.rate:.3g} {result.unit}{share}{ratios}{alone}{host}"


def measure_all(
    cases: list[Case[Any]], measure_row: Callable[[Case[Any]], Result], console: Console
) -> tuple[list[Result], int]:
    """Measure the rows, with one line for each as it is done. Returns them and how many failed."""
    results: list[Result] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            try:
                results.append(measure_row(case))
            except RuntimeError as error:  # of one contender, or no memory for this row: the others still count
                text = f"{case.name}: failed: {str(error).splitlines()[0]}"
                console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
            else:
                console.print(_line(results[-1]), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    return results, len(cases) - len(results)


def _run(
    cases: list[Case[Any]],
    measure_row: Callable[[Case[Any]], Result],
    environment: dict[str, Any],
    options: argparse.Namespace,
    console: Console,
) -> int:
    """Measure, print and write; 1 where a row failed, else 0."""
    console.print(report.describe(environment), markup=False, highlight=False, soft_wrap=True)
    if environment["load_average"] > 0.5 * environment["cores"]:
        console.print("note: other programs are running; the figures will be too low", style="yellow")
    results, failed = measure_all(cases, measure_row, console)
    if results:
        label = options.label
        if label is None and options.out is None:
            label = "quick" if options.quick else "part" if options.only else None
        stem = report.file_stem(environment, options.command, label)
        written = report.write_all(options.out or RESULTS, stem, environment, results, plot=options.command == "cpu")
        console.print("written: " + ", ".join(map(str, written)), markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def run_cpu(cases: list[Case[Any]], options: argparse.Namespace, console: Console) -> int:
    probes.library()
    seconds = options.seconds or (0.2 if options.quick else 4.0)
    with machine.cpu_level(options.isa) if options.isa else nullcontext(), torch.inference_mode():
        return _run(cases, partial(measure, seconds=seconds), describe_environment(), options, console)


def run_gpu(cases: list[Case[Any]], options: argparse.Namespace, console: Console) -> int:
    found = machine.find_gpu()
    if found is None or found.problem:
        reason = found.problem if found else "torch finds none"
        raise RuntimeError(f"benchmarks: {options.command}: expected an NVIDIA GPU that flashq can use: {reason}")
    gpu_probes.library()
    seconds = options.seconds or (0.05 if options.quick else 1.0)
    with torch.inference_mode():
        ceilings = gpu_ceilings.Ceilings(*(1 << 26, 1024) if options.quick else ())
        environment = {
            **describe_environment(),
            **gpu_ceilings.under_load(ceilings, describe_gpu),
            **ceilings.rates(),
            "mode": "cool" if options.cool else "hot",
            "pause": COOL_PAUSE if options.cool else 0.0,
            "forced_arch": os.environ.get("FLASHQ_CUDA_ARCH"),
            "peers": gpu_peers.versions(),
        }
        row = partial(gpu.measure, seconds=seconds, ceilings=ceilings, pause=environment["pause"])
        return _run(cases, row, environment, options, console)


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if options.command == "compare":
        return compare.run(options.before, options.after)
    console = Console()
    make_cases = GPU_COMMANDS[options.command][1] if options.command in GPU_COMMANDS else cpu.cases
    cases = [case for case in make_cases(options.quick) if re.search(options.only or "", case.name)]
    if not cases:
        return _refuse(console, f"benchmarks: --only: expected the name of a row, got {options.only!r}")
    try:
        return (run_gpu if options.command in GPU_COMMANDS else run_cpu)(cases, options, console)
    except RuntimeError as error:  # no GPU, no compiler
        return _refuse(console, str(error))


if __name__ == "__main__":
    sys.exit(main())
