"""A small run of `python -m benchmarks cpu`, its files, and the probes."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, probes
from benchmarks.__main__ import main
from benchmarks.environment import describe_environment, shown_command
from benchmarks.measure import Case
from flashq.cli import machine

needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@needs_compiler
def test_probes_give_plausible_rates() -> None:
    probes.library.cache_clear()
    assert 1e8 < probes.fma_rate(1 << 16) < 1e14
    assert 1e7 < probes.read_rate([torch.zeros(1 << 20)], least_bytes=1e7) < 1e13
    assert probes.bf16_rate(1 << 12) >= 0


@needs_compiler
def test_quick_run_writes_json_markdown_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = machine.cpu_levels().available[0]
    arguments = ["--quick", "--seconds", "0.01", "--isa", level, "--out", str(tmp_path / "out")]
    assert main(["cpu", "--only", "^decode bf16 1x2048|tbq4_quantize", *arguments]) == 0
    (path,) = (tmp_path / "out").glob("*.json")
    assert path.stem.endswith(f"-{level}")
    document = json.loads(path.read_text())
    assert {"cpu", "threads", "torch", "commit", "dirty", "date", "command"} <= set(document["environment"])
    assert document["environment"]["cpu_level"] == level
    names = [row["name"] for row in document["rows"]]
    assert names == ["decode bf16 1x2048 heads 8/2 D128", "tbq4_quantize bf16 256 tokens heads 8 D128"]
    assert document["rows"][0]["ceiling"] > 0
    assert set(document["rows"][0]["ratios"]) == {"torch SDPA", "torch SDPA, group as queries"}
    markdown = path.with_suffix(".md").read_text()
    assert "x torch SDPA" in markdown
    assert names[0] in markdown
    with path.with_suffix(".csv").open() as file:
        assert next(csv.DictReader(file))["contender"] == "flashq"
    assert names[0] in capsys.readouterr().out.replace("\n", " ")


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu", "--only", "no such row"]) == 2
    assert "--only" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["cpu", "--only", "("])
    assert "expected a regular expression, got '('" in capsys.readouterr().err


def test_missing_compiler_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probes.library.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(probes.shutil, "which", lambda name: None)
    assert main(["cpu", "--quick", "--only", "decode"]) == 2
    assert "C++ compiler" in capsys.readouterr().out


def test_rows_name_their_heads_and_are_unique() -> None:
    names = [case.name for quick in (False, True) for case in cpu.cases(quick)]
    assert len(names) == len(set(names))
    assert all("heads " in name for name in names)


ATTENTION = [case for case in cpu.cases(quick=True) if case.suite != "codec"]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_contenders_answer_the_same_question(case: Case) -> None:
    with torch.inference_mode():
        setup = case.prepare()
        results = {name: call() for name, call in setup.contenders.items()}
    results = {name: result[0] if isinstance(result, tuple) else result for name, result in results.items()}
    own = results.pop("flashq").float()  # (B, S, Hq, D)
    assert results
    for name, other in results.items():
        if case.suite == "prefill":
            other = other.transpose(1, 2)
        other = other.float().reshape(own.shape)  # one query: the axes of (B, Hq, 1, D) and (B, Hkv, G, D) are in order
        error = ((own - other).norm() / other.norm()).item()
        assert error < (0.2 if case.suite == "tbq4" else 0.01), name


def test_the_command_is_recorded_without_its_folder() -> None:
    expected = "python -m benchmarks cpu --only '^a|b' --seconds 1"
    for out in ([], ["--out", "/tmp/a b"], ["--out=/tmp/a"]):
        assert shown_command(["cpu", *out, "--only", "^a|b", "--seconds", "1"]) == expected
    assert shown_command(["cpu", "--out"]) == "python -m benchmarks cpu"


def test_a_copy_of_the_tree_is_named_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQ_COMMIT", "0123abc")
    environment = describe_environment()
    assert (environment["commit"], environment["dirty"]) == ("0123abc", None)
