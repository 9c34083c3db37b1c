"""The runner of compute-sanitizer: what it makes of the tools' output, and that its calls are valid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sanitize import __main__ as runner
from sanitize import calls

CLEAN = "========= COMPUTE-SANITIZER\nsanitize: 9 calls done\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\nsanitize: 9 calls done\n"
REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n"


def read(output: str, status: int = 0) -> runner.Outcome:
    return runner.read_output(output, status, runner.DONE.search(output) is not None)


def test_clean_output_passes() -> None:
    assert read(CLEAN).passed
    assert read(
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\nsanitize: 9 calls done\n"
    ).passed


@pytest.mark.parametrize(
    ("output", "findings", "text"),
    [
        (RACES, 3, "3"),
        (CLEAN.replace("0 errors", "1 error"), 1, "1"),
        (CLEAN.replace("0 errors", "12 errors"), 12, "12"),
        (CLEAN.replace("sanitize: 9 calls done\n", "Traceback\n"), 0, "ended early, exit code 1"),
        (REFUSED, None, "did not run: Error: Device not supported"),
        (REFUSED + CLEAN, None, "did not run: Error: Device not supported"),
        ("permission denied\n", None, "did not run: exit code 1: permission denied"),
        ("", None, "did not run: exit code 1: no output"),
    ],
)
def test_anything_else_does_not(output: str, findings: int | None, text: str) -> None:
    outcome = read(output, 1)
    assert outcome.findings == findings
    assert not outcome.passed
    assert text in runner.describe(outcome)


@pytest.mark.parametrize(
    ("own", "planted", "passed"),
    [(CLEAN, RACES, True), (CLEAN, CLEAN, False), (CLEAN, REFUSED, False), (RACES, RACES, False)],
)
def test_a_tool_must_find_the_planted_bug_and_nothing_else(
    own: str, planted: str, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.show(Console(width=200), {"memcheck": (read(own), read(planted))}) is passed
    assert ("NOT PASSED" in capsys.readouterr().out) is not passed


@pytest.mark.parametrize(("own", "planted", "code"), [(CLEAN, RACES, 0), (RACES, RACES, 1), (REFUSED, REFUSED, 1)])
def test_exit_code(
    own: str,
    planted: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"  # only says what a real one would
    lines = ["#!/bin/sh", 'case "$*" in', "*tests.sanitize.calls*) cat <<'END'", f"{own}END", ";;"]
    sanitizer.write_text("\n".join([*lines, "*) cat <<'END'", f"{planted}END", "esac", ""]))
    sanitizer.chmod(0o755)
    monkeypatch.setattr(runner, "find", lambda name, *more: str(sanitizer))
    monkeypatch.setattr(runner, "build_control", lambda folder: "control")
    assert runner.main(["--tools", "racecheck", "--ops", "rotate", "--logs", str(tmp_path / "logs")]) == code
    assert (tmp_path / "logs/racecheck-tbq4_rotate.txt").read_text() == own
    assert (tmp_path / "logs/racecheck-planted-bug.txt").read_text() == planted
    text = capsys.readouterr().out
    assert re.search(r"^racecheck tbq4_rotate: (0 in 9 calls|3 in 9 calls|did not run: Error: .*), \d s$", text, re.M)


def wait_until_gone(number: str) -> None:
    """Fails if process `number` still runs in 10 s; a zombie that nobody has waited for does not."""
    end = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while (state := Path("/proc", number, "stat").read_text().rsplit(")", 1)[1].split()[0]) != "Z":
            assert time.monotonic() < end, state
            time.sleep(0.01)


def test_a_tool_out_of_time_leaves_nothing_running(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"  # it starts its program and waits, as the real one
    tool.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/program\necho so far\nwait\n")
    tool.chmod(0o755)
    outcome = runner.sanitize(str(tool), runner.Job("memcheck", ("decode",)), "control", 0.5, [])
    assert outcome.output == "so far\n"
    assert not outcome.passed
    assert "not done after" in outcome.problem
    wait_until_gone((tmp_path / "program").read_text().strip())


def test_jobs_run_every_call_of_every_op_once_under_every_tool() -> None:
    ran: dict[tuple[str, str], list[int]] = {}
    jobs = runner.make_jobs(list(runner.TOOLS), "")
    for job in jobs:
        number, parts = map(int, job.part.split("/"))
        for op in job.ops if not job.arch else ():
            ran.setdefault((job.tool, op), []).extend(range(number - 1, 100, parts))
    assert set(ran) == {(tool, op) for tool in runner.TOOLS for op in calls.CALLS}
    assert all(sorted(numbers) == list(range(100)) for numbers in ran.values())
    assert [job.tool for job in jobs if not job.ops] == list(runner.TOOLS)
    assert {job.ops for job in runner.make_jobs(["memcheck"], "varlen|rotate")} == {
        ("prefill_varlen",),
        ("tbq4_rotate",),
        (),
    }


def test_what_initcheck_cannot_see_is_read_back_of_other_kernels() -> None:
    jobs = runner.make_jobs(["initcheck"], "")
    for job in jobs:
        hidden = bool(set(job.ops) & runner.BY_TMA)
        assert ("--leave-outputs" in job.program("control")) == (hidden and not job.arch)
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in job.environment
    (other,) = (job for job in jobs if job.arch)
    assert set(other.ops) == runner.BY_TMA
    assert other.environment["FLASHQ_CUDA_ARCH"] == "80"


def test_one_job_that_does_not_pass_is_enough() -> None:
    clean, found, late = read(CLEAN), read(RACES), runner.Outcome(None, "not done after 9 s")
    jobs = [runner.Job("racecheck", ("decode",), part) for part in ("1/2", "2/2")]
    assert runner.join(list(zip(jobs, (clean, clean), strict=True))).passed
    assert runner.describe(runner.join(list(zip(jobs, (clean, late), strict=True)))) == (
        "did not run: racecheck decode 2/2: not done after 9 s"
    )
    joined = runner.join(list(zip(jobs, (found, late), strict=True)))
    assert joined.findings == 3
    assert not joined.passed


def test_parts_are_all_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran = []
    monkeypatch.setattr(calls, "run", lambda op, call, leave_outputs: ran.append((op, call[0][0].shape, call[1])))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls.main("tbq4_rotate")
    whole = ran[:]
    ran.clear()
    for part in ("1/3", "2/3", "3/3"):
        calls.main("tbq4_rotate", part, in_range=True)
    assert sorted(map(str, ran)) == sorted(map(str, whole))
    assert f"sanitize: {len(whole)} calls done\n" in capsys.readouterr().out


def test_a_runner_that_is_ended_leaves_nothing_running(tmp_path: Path) -> None:
    tool = tmp_path / "bin/compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/program\nwait\n")
    (tmp_path / "bin/nvcc").write_text("#!/bin/sh\nexit 0\n")
    for path in tool.parent.iterdir():
        path.chmod(0o755)
    command = [sys.executable, "-m", "tests.sanitize", "--tools", "memcheck", "--ops", "rotate", "--jobs", "1"]
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(command, cwd=runner.ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 30
        while not (tmp_path / "program").exists() or not (number := (tmp_path / "program").read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    wait_until_gone(number)


def test_no_sanitizer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find", lambda name, *more: None)
    assert runner.main([]) == 2
    assert "NOT PASSED" in capsys.readouterr().out


@pytest.mark.skipif(runner.find("nvcc") is None, reason="no nvcc")
def test_planted_bugs_compile(tmp_path: Path) -> None:
    command = [runner.find("nvcc"), "-std=c++20", "-arch=sm_80", str(runner.HERE / "control.cu")]
    subprocess.run([*command, "-o", str(tmp_path / "control")], check=True)


def test_every_op_of_the_cuda_backend_is_called() -> None:
    table = (runner.ROOT / "csrc/cuda/backend.cu").read_text()
    entries = set(re.findall(r"= checked<(\w+)>,$", table, re.M))
    # prefill_varlen has no entry of its own.
    assert entries == {op.rstrip("_") for op in calls.CALLS} - {"prefill_varlen"}
    assert "prefill_varlen" in calls.CALLS


@pytest.mark.parametrize("op", calls.CALLS)
def test_calls_are_valid(op: str) -> None:
    with torch.inference_mode():
        for arguments, options in calls.CALLS[op]():
            getattr(torch.ops.flashq, op)(*arguments, **options)


@pytest.mark.parametrize("op", calls.OUT_OF_RANGE)
def test_calls_out_of_range_are_out_of_range(op: str) -> None:
    for arguments, options in calls.OUT_OF_RANGE[op]():
        with pytest.raises(RuntimeError, match=rf"flashq::{op}: (slots|positions|seqlens|cu_seqlens_q)\["):
            getattr(torch.ops.flashq, op)(*arguments, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("op", calls.CALLS)
def test_calls_run_on_a_gpu(op: str) -> None:
    with torch.inference_mode():
        for table in (calls.CALLS, calls.OUT_OF_RANGE):
            for call in table.get(op, list)():
                calls.run(op, call)
    torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="not a Hopper GPU")
def test_calls_reach_every_kernel() -> None:
    pattern = r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\("
    sources = [path for path in (runner.ROOT / "csrc/cuda").rglob("*.cu*") if path.stem != "check_indices"]
    kernels = {name for path in sources for name in re.findall(pattern, path.read_text())}
    assert "merge_kernel" in kernels
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, torch.inference_mode():
        for op, make in calls.CALLS.items():
            for call in make():
                calls.run(op, call)
        torch.cuda.synchronize()
    seen = {event.key for event in profile.key_averages()}
    assert {"sm90::" in key for key in seen if re.search(r"\bprefill_kernel\b", key)} == {True, False}
    assert {kernel for kernel in kernels if not any(re.search(rf"\b{kernel}\b", key) for key in seen)} == set()
