"""What `benchmarks compare` calls a change."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.compare import compare_rows
from benchmarks.measure import Result, Spread
from benchmarks.report import to_json

ENVIRONMENT = {"cpu": "some CPU", "cores": 2, "threads": 2, "cpu_level": "avx2", "torch": "2.13", "compiler": "g++"}


def row(name: str, median: float, noise: float = 0.01, ceiling: float | None = 100.0) -> Result:
    spread = Spread(median, median * (1 - noise), median * (1 + noise), 9)
    return Result("decode", name, "GB/s", 1 / median, ceiling, {"torch SDPA": 2.0}, {"flashq": spread})


@pytest.mark.parametrize(
    ("after", "noise", "verdict"),
    [(1.0, 0.01, ""), (1.3, 0.01, "slower"), (0.7, 0.01, "faster"), (1.3, 0.4, ""), (1.015, 0.001, "")],
)
def test_verdict_needs_a_change_beyond_noise(after: float, noise: float, verdict: str) -> None:
    (change,) = compare_rows([row("a", 1.0, noise)], [row("a", after, noise)])
    assert change.verdict == verdict
    assert change.speedup == pytest.approx(1 / after)


def test_ceiling_tells_a_slower_machine_from_slower_code() -> None:
    (change,) = compare_rows([row("a", 1.0)], [row("a", 2.0, ceiling=50.0)])
    assert change.ceiling_change == pytest.approx(0.5)


def test_rows_of_one_file_only_are_not_compared() -> None:
    assert compare_rows([row("a", 1.0)], [row("b", 1.0)]) == []


def write(path: Path, rows: list[Result], **changes: object) -> str:
    path.write_text(to_json({**ENVIRONMENT, **changes}, rows))
    return str(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "a.json", [row("steady", 1.0), row("worse", 1.0), row("gone", 1.0)])
    after = write(tmp_path / "b.json", [row("steady", 1.001), row("worse", 1.5)], threads=4)
    assert main(["compare", before, after]) == 1
    out = capsys.readouterr().out
    for text in ("slower", "within noise", "only in A: gone", "threads differs: 2 and 4"):
        assert text in out
    assert main(["compare", before, before]) == 0


def damage(path: Path, **changes: object) -> str:
    """A result file of one row, with other values in it."""
    document = json.loads(to_json(ENVIRONMENT, [row("a", 1.0)]))
    spread = document["rows"][0]["seconds"]["flashq"]
    for key, value in changes.items():
        next(part for part in (spread, document["rows"][0], document) if key in part)[key] = value
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": [1]}, {"environment": "x"}, {"rows": [None]}, {"rows": None}, {"seconds": {}}, {"seconds": []},
        {"median": 0}, {"median": "1"}, {"median": None}, {"median": float("nan")}, {"low": None}, {"high": [1]},
        {"name": [1]}, {"name": 3}, {"ceiling": "x"}, {"ceiling": 0}, {"rate": None},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_results(changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.json", [row("a", 1.0)])
    bad = damage(tmp_path / "bad.json", **changes)
    for files in ((good, bad), (bad, good)):
        assert main(["compare", *files]) == 2
        assert "expected a result" in capsys.readouterr().out.replace("\n", " ")


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "[bold].json", [row("[/red] a", 1.0)])
    assert main(["compare", file, file]) == 0
    out = capsys.readouterr().out
    assert "[/red] a" in out
    assert "[bold].json" in out


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "a.json", [row("a", 1.0)])
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["compare", good, str(bad)]) == 2
    assert "expected a result" in capsys.readouterr().out.replace("\n", " ")
    assert main(["compare", good, str(tmp_path / "none.json")]) == 2
