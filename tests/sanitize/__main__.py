"""`python -m tests.sanitize`: small calls of every CUDA op under every tool of compute-sanitizer.

Exit code 0 only when every tool ran, found a bug planted for it (control.cu), and found nothing in flashq. What a
machine refuses to run counts as not passed, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS: dict[str, list[str]] = {
    "memcheck": ["--padding", "64"],  # a write between two allocations is one past the end of the first
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}
DONE = re.compile(r"^sanitize: (\d+) calls done$", re.M)
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)", re.M)
REFUSAL = re.compile(r"^=+ (?:Error|Fatal|Target application|Device not supported|.*not supported).*$", re.M | re.I)


@dataclass
class Outcome:
    """What one tool said about one program."""

    findings: int | None
    """None: the tool did not get to a summary."""
    problem: str = ""
    """Why there is none."""
    seconds: float = 0.0
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.findings == 0 and not self.problem


def read_output(output: str, status: int, finished: bool) -> Outcome:
    """The outcome of a run.

    Args:
        output: stdout and stderr of compute-sanitizer and its program.
        status: the exit code.
        finished: the program says that it did everything.
    """
    counts = [int(a or b) for a, b in SUMMARY.findall(output)]
    if not counts or re.search("device not supported", output, re.I):
        reason = REFUSAL.search(output)
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Outcome(None, reason[0].strip("= ") if reason else f"exit code {status}: {last[0]}", output=output)
    problem = "" if finished or sum(counts) else f"the program ended early, exit code {status}"
    return Outcome(sum(counts), problem, output=output)


def find(name: str, *more: str) -> str | None:
    """A program of the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", *more)]
    return shutil.which(name) or next(filter(None, (shutil.which(name, path=place) for place in places)), None)


def end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started: killed alone, compute-sanitizer leaves its program running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def sanitize(
    sanitizer: str,
    tool: str,
    program: Sequence[str],
    done: re.Pattern[str],
    timeout: float,
    running: list[subprocess.Popen[str]],
) -> Outcome:
    """Run the program under the tool, in a process group of its own. `running` is told of it."""
    # Without its cache torch's tensors are allocations of their own, whose ends memcheck knows. The kernel that checks
    # index tensors is to run, too.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FLASHQ_CHECK": "1"}
    command = [sanitizer, "--tool", tool, *TOOLS[tool], *program]
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        running.append(process)
        try:
            output = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            end(process)
            return Outcome(None, f"not done after {timeout:.0f} s", timeout)
    outcome = read_output(output, process.returncode, done.search(output) is not None)
    outcome.seconds = time.perf_counter() - start
    return outcome


def build_control(folder: str) -> str:
    """Compile the program with the planted bugs.

    Raises:
        RuntimeError: there is no nvcc, or it fails.
    """
    nvcc = find("nvcc")
    if nvcc is None:
        raise RuntimeError("the planted bugs need nvcc: expected it on PATH or in CUDA_HOME, found none")
    path = f"{folder}/control"
    command = [nvcc, "-std=c++20", "-arch=native", "-lineinfo", str(HERE / "control.cu"), "-o", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling the planted bugs failed: {(done.stderr or done.stdout).strip()[:300]}")
    return path


def describe(outcome: Outcome) -> str:
    if outcome.findings is None:
        return f"did not run: {outcome.problem}"
    return f"{outcome.findings}" + (f" ({outcome.problem})" if outcome.problem else "")


def show(console: Console, rows: dict[str, tuple[Outcome, Outcome]]) -> bool:
    """Print tool x findings; whether everything passed."""
    table = Table("tool", "findings in flashq", "findings in the planted bug", "seconds", "")
    passed = True
    for tool, (own, control) in rows.items():
        good = own.passed and bool(control.findings)
        passed &= good
        verdict = "[green]passed[/]" if good else "[bold red]NOT PASSED[/]"
        seconds = f"{own.seconds + control.seconds:.0f}"
        table.add_row(tool, escape(describe(own)), escape(describe(control)), seconds, verdict)
    console.print(table)
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description="CUDA ops under compute-sanitizer.")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--ops", default="", metavar="REGEX", help="ops whose name it matches somewhere")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for every tool")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the tools' output there")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    sanitizer = find("compute-sanitizer", "compute-sanitizer")
    if sanitizer is None:
        console.print("sanitize: expected compute-sanitizer on PATH or in CUDA_HOME, found none: NOT PASSED")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            control = build_control(folder)
        except RuntimeError as error:
            console.print(f"sanitize: {error}: NOT PASSED", markup=False)
            return 2
        calls = [sys.executable, "-m", "tests.sanitize.calls", options.ops]
        running: list[subprocess.Popen[str]] = []

        def run_tool(tool: str) -> tuple[Outcome, Outcome]:
            own = sanitize(sanitizer, tool, calls, DONE, options.timeout, running)
            control_done = re.compile("control: ")
            planted = sanitize(sanitizer, tool, [control, tool], control_done, options.timeout, running)
            console.print(f"{tool}: {describe(own)}, {own.seconds + planted.seconds:.0f} s", highlight=False)
            return own, planted

        # Each tool spends most of its time in a thread of the host: together they take as long as the slowest.
        with ThreadPoolExecutor(len(options.tools)) as pool:
            try:
                rows = dict(zip(options.tools, pool.map(run_tool, options.tools), strict=True))
            except BaseException:  # Ctrl-C: the threads wait for their programs
                for process in running:
                    end(process)
                raise
    for tool, (own, planted) in rows.items():
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{tool}.txt").write_text(own.output + planted.output)
        if not own.passed:
            console.print(own.output[-4000:], markup=False, highlight=False)
    return 0 if show(console, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
