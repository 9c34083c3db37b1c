"""`python -m flashq selftest` passes here, and fails when an op is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashq
from flashq.cli import machine, main, selftest
from flashq.cli.selftest_cases import CASES, Comparison


def test_every_op_has_a_case() -> None:
    ops = {str(name).removeprefix("flashq::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
           if str(name).startswith("flashq::")}  # fmt: skip
    assert ops == set(CASES)


def test_passes_at_every_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = machine.cpu_levels().selected
    path = tmp_path / "selftest.json"
    assert main.main(["selftest", "--json", str(path)]) == 0
    assert "everything passed" in capsys.readouterr().out
    columns = json.loads(path.read_text())
    assert {f"cpu, {level}" for level in machine.cpu_levels().available} <= set(columns)
    for results in columns.values():
        assert set(results) == set(CASES)
        assert all(result["comparisons"] > 0 or result["state"] == "not on this device" for result in results.values())
    assert machine.cpu_levels().selected == before


def _first(result: object) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("op", CASES)
def test_fails_when_an_op_is_slightly_wrong(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of the op's result, or of what it wrote, is off."""
    real = getattr(flashq, op)
    written = {"kv_append_": 2, "tbq4_append_": 3}

    def wrong(*arguments: torch.Tensor, **options: object) -> object:
        result = real(*arguments, **options)
        target = arguments[written[op]] if op in written else _first(result)
        value = target.view(-1)[target.numel() // 2 :][:1]
        value += 1 if target.dtype == torch.uint8 else 0.25
        return result

    monkeypatch.setattr(flashq, op, wrong)
    result = selftest.run_case(CASES[op], "cpu")
    assert result.state == selftest.FAILED, result


def test_failure_is_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> Iterator[Comparison]:
        yield Comparison("out", float("nan"), 1.0)

    def raising(device: str) -> Iterator[Comparison]:
        yield Comparison("out", 0.0, 1.0)
        raise RuntimeError("flashq::decode: q: expected this, got that")

    cases = {"merge_states": CASES["merge_states"], "prefill": broken, "decode": raising}
    monkeypatch.setattr(selftest, "CASES", cases)
    assert main.main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert "FAILED in" in out
    assert "out: nan, at most 1" in out
    assert "flashq::decode: q: expected this, got that" in out


def test_case_that_compares_nothing_fails() -> None:
    assert selftest.run_case(lambda device: iter(()), "cpu").state == selftest.FAILED


def test_absent_cuda_op_is_no_failure_but_an_absent_cpu_op_is() -> None:
    def refused(device: str) -> Iterator[Comparison]:
        raise RuntimeError("flashq::decode: device: expected cpu, because this version has no CUDA kernel for this op")
        yield

    assert selftest.run_case(refused, "cuda").state == selftest.ABSENT
    assert selftest.run_case(refused, "cpu").state == selftest.FAILED
