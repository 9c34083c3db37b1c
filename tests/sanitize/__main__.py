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
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS: dict[str, list[str]] = {
    "memcheck": ["--padding", "64"],  # a write between two allocations is one past the end of the first
    # Without the second, what one barrier orders for another (a block's and a cluster's in decode) counts as a race.
    "racecheck": ["--racecheck-report", "all", "--racecheck-indirect-barrier-dependency"],
    "initcheck": [],
    # With its checks of wgmma, the tool's 2025.3 never returns from the Hopper prefill kernel.
    "synccheck": ["--check-warpgroup-mma", "no"],
}
# Without its cache torch's tensors are allocations of their own, whose ends memcheck knows, and initcheck sees what
# nobody wrote. The others take a third of the time with it.
UNCACHED = ("memcheck", "initcheck")
# On Hopper these run kernels of its own, so those for compute capability 8.0 get processes, too. And initcheck does not
# see the outputs that the former write by TMA: there they are not read back.
BY_TMA = {"prefill", "prefill_varlen"}
# Ops of one process: what takes the longest is its start.
GROUPS = (
    ("tbq4_attention",),
    ("decode",),
    ("prefill", "prefill_varlen"),
    ("tbq4_append_", "tbq4_rope_append_", "tbq4_page_offsets_"),
    ("tbq4_quantize", "tbq4_dequantize", "tbq4_rotate", "kv_append_", "merge_states"),
)
# Where one process would take the longest of all: in so many.
PARTS = {("racecheck", ops): 3 for ops in GROUPS[:3]}
PLANTED = "planted bug"
DONE = re.compile(r"^sanitize: (\d+) calls done$", re.M)
CONTROL_DONE = re.compile("control: ")
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


@dataclass(frozen=True)
class Job:
    """One process under one tool: calls of some ops, or the planted bug, which is no op."""

    tool: str
    ops: tuple[str, ...] = ()
    part: str = "1/1"
    arch: str = ""
    """FLASHQ_CUDA_ARCH"""

    @property
    def name(self) -> str:
        part, arch = self.part if self.part != "1/1" else "", f"sm_{self.arch}" if self.arch else ""
        return " ".join(filter(None, (self.tool, *(self.ops or [PLANTED]), part, arch)))

    @property
    def environment(self) -> dict[str, str]:
        """The kernel that checks index tensors is to run, too."""
        variables = {"FLASHQ_CHECK": "1", "OMP_NUM_THREADS": "1"}
        if self.tool in UNCACHED:
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        if self.arch:
            variables["FLASHQ_CUDA_ARCH"] = self.arch
        return os.environ | variables

    def program(self, control: str) -> list[str]:
        if not self.ops:
            return [control, self.tool]
        # What an index out of range may do is read or write where it must not.
        more = [] if self.tool == "memcheck" else ["--in-range"]
        if self.tool == "initcheck" and set(self.ops) & BY_TMA and not self.arch:
            more.append("--leave-outputs")
        return [sys.executable, "-m", "tests.sanitize.calls", ",".join(self.ops), self.part, *more]


def make_jobs(tools: Sequence[str], pattern: str) -> list[Job]:
    """The longest first."""
    jobs = []
    for tool, group in product(tools, GROUPS):
        ops = tuple(op for op in group if re.search(pattern, op))
        if not ops:
            continue
        parts = PARTS.get((tool, group), 1)
        jobs += [Job(tool, ops, f"{number}/{parts}") for number in range(1, parts + 1)]
        if set(ops) <= BY_TMA:
            jobs.append(Job(tool, ops, arch="80"))
    jobs.sort(key=lambda job: (job.tool != "racecheck", GROUPS[0][0] not in job.ops))
    return [*jobs, *map(Job, tools)]


def sanitize(sanitizer: str, job: Job, control: str, timeout: float, running: list[subprocess.Popen[str]]) -> Outcome:
    """Run the job's program, in a process group of its own. `running` is told of it."""
    command = [sanitizer, "--tool", job.tool, *TOOLS[job.tool], *job.program(control)]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        process = subprocess.Popen(
            command,
            env=job.environment,
            text=True,
            stdout=written,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        running.append(process)
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            end(process)
            process.wait()
        written.seek(0)
        output = written.read()
    if late:
        outcome = Outcome(None, f"not done after {timeout:.0f} s", output=output)
    else:
        done = DONE if job.ops else CONTROL_DONE
        outcome = read_output(output, process.returncode, done.search(output) is not None)
    outcome.seconds = time.perf_counter() - start
    return outcome


def join(outcomes: Sequence[tuple[Job, Outcome]]) -> Outcome:
    """What the jobs of one tool say together."""
    known = [outcome.findings for _, outcome in outcomes if outcome.findings is not None]
    problems = [f"{job.name}: {outcome.problem}" for job, outcome in outcomes if outcome.problem]
    findings = sum(known) if len(known) == len(outcomes) or sum(known) else None
    return Outcome(findings, "; ".join(problems), sum(outcome.seconds for _, outcome in outcomes))


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
    table = Table("tool", "findings in flashq", "findings in the planted bug", "seconds of processes", "")
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
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 12), help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for every process")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the tools' output there")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    sanitizer = find("compute-sanitizer", "compute-sanitizer")
    if sanitizer is None:
        console.print("sanitize: expected compute-sanitizer on PATH or in CUDA_HOME, found none: NOT PASSED")
        return 2
    jobs = make_jobs(options.tools, options.ops)
    with tempfile.TemporaryDirectory() as folder:
        try:
            control = build_control(folder)
        except RuntimeError as error:
            console.print(f"sanitize: {error}: NOT PASSED", markup=False)
            return 2
        running: list[subprocess.Popen[str]] = []

        def run_job(job: Job) -> Outcome:
            outcome = sanitize(sanitizer, job, control, options.timeout, running)
            calls = DONE.search(outcome.output)
            of = f" in {calls[1]} calls" if calls else ""
            console.print(f"{job.name}: {describe(outcome)}{of}, {outcome.seconds:.0f} s", markup=False)
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{re.sub(r'[ /]+', '-', job.name)}.txt").write_text(outcome.output)
            return outcome

        # The GPU serves one process at a time, but each spends most of its time on the host.
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                outcomes = list(zip(jobs, pool.map(run_job, jobs), strict=True))
            except BaseException:  # Ctrl-C: the threads wait for their programs
                pool.shutdown(wait=False, cancel_futures=True)
                for process in running:
                    end(process)
                raise
    rows = {}
    for tool in options.tools:
        own = [(job, outcome) for job, outcome in outcomes if job.tool == tool and job.ops]
        planted = next(outcome for job, outcome in outcomes if job == Job(tool))
        rows[tool] = join(own), planted
        for job, outcome in own:
            if not outcome.passed:
                console.print(f"{job.name}:\n{outcome.output[-4000:]}", markup=False)
    return 0 if show(console, rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the programs end with this one
    sys.exit(main())
