"""Results as json, csv, markdown and a plot."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Result
from flashq.cli.timing import format_seconds

HEADER = ["suite", "row", "contender", "median_s", "q1_s", "q3_s", "rounds", "rate", "unit", "ceiling", "x"]
UNITS = {
    ("cpu", "prefill"): "% of the FMA peak",
    ("cpu", "decode"): "% of the read probe",
    ("cpu", "tbq4"): "% of the read probe",
    ("gpu", "tbq4"): "% of read",
    ("gpu", "decode"): "% of read",
    ("gpu", "variants"): "% of read",
    ("gpu", "codec"): "% of copy",
    ("gpu", "append"): "% of copy",
    ("gpu", "merge"): "% of copy",
    ("gpu", "dense"): "% of matmul",
}


def file_stem(environment: dict[str, Any], command: str, label: str | None = None) -> str:
    """cpu-amd-epyc-2t-avx2, cuda-nvidia-h200-hot: what a result file is called; `label` comes last."""
    if "gpu" in environment:
        words = [command, environment["gpu"], environment["mode"]]
        if environment.get("forced_arch"):
            words.append(f"sm{environment['forced_arch']}")
    else:
        words = [command, environment["cpu"], f"{environment['threads']}t", environment["cpu_level"]]
    words += [label] if label else []
    return "-".join(re.sub(r"[^a-z0-9]+", "-", str(word).lower()).strip("-") for word in words)


def to_json(environment: dict[str, Any], results: list[Result]) -> str:
    document = {"environment": environment, "rows": [result.to_json() for result in results]}
    return json.dumps(document, indent=1) + "\n"


def read_json(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The environment and the rows of a result file.

    Raises:
        ValueError: the file is none.
    """
    try:
        document = json.loads(path.read_text())
        return dict(document["environment"]), [Result.from_json(row) for row in document["rows"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"benchmarks: {path}: expected a result of `python -m benchmarks`, got {error!r}") from error


def _number(value: Any, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"


def _describe_gpu(environment: dict[str, Any]) -> str:
    """The GPU, with its clocks under load, and the ceilings of the run."""
    pause = "back to back" if environment["mode"] == "hot" else f"after pauses of {environment['pause']:g} s"
    return (
        f"{environment['gpu']} (compute capability {environment['compute_capability']}, {environment['sms']} SMs, "
        f"{environment['l2_bytes'] / 2**20:.0f} MiB of L2, power limit {_number(environment['power_limit'], 'W')}), "
        f"driver {environment['driver'] or 'unknown'}, CUDA {environment['cuda']}, flashq built for "
        f"{environment['cuda_archs']}; under load SM clock {_number(environment['sm_clock'], 'MHz')} of "
        f"{_number(environment['max_sm_clock'], 'MHz')}, memory clock {_number(environment['memory_clock'], 'MHz')}, "
        f"{_number(environment['temperature'], 'degrees Celsius')}. Ceilings: read "
        f"{environment['read_rate'] / 1e12:.2f} TB/s, copy {environment['copy_rate'] / 1e12:.2f} TB/s (read and "
        f"written), bf16 products {environment['matmul_rate'] / 1e12:.0f} TFLOP/s. Replays {pause}. "
        + (f"Kernels for compute capability {forced}. " if (forced := environment.get("forced_arch")) else "")
        + (f"Installed: {peers}. " if (peers := environment.get("peers")) else "")
    )


def describe(environment: dict[str, Any]) -> str:
    """The header as text."""
    commit = str(environment["commit"]) + (" with local changes" if environment["dirty"] else "")
    return (
        f"{environment['date']}, flashq {environment['flashq']} ({commit}), torch {environment['torch']}, "
        f"Python {environment['python']}, {environment['compiler']}. "
        + (_describe_gpu(environment) if "gpu" in environment else "")
        + f"{environment['cpu']}, {environment['cores']} cores, {environment['threads']} threads, "
        f"{environment['cpu_level']}; load {environment['load_average']:.1f} at the start. "
        f"Command: `{environment['command']}`."
    )


def _peers(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(peer for result in results for peer in result.ratios))


def _own(result: Result) -> str:
    """The contender that the row is about."""
    return next(iter(result.seconds))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _table(suite: str, rows: list[Result], place: str) -> str:
    """A row's time, rate, share of the ceiling, how many times as fast as each peer, and what else is known."""
    columns: dict[str, Callable[[Result], str]] = {
        suite: lambda row: row.name,
        "median": lambda row: format_seconds(row.seconds[_own(row)].median),
        rows[0].unit: lambda row: f"{row.rate:.3g}",
    }
    if any(row.ceiling for row in rows):
        label = UNITS.get((place, suite), "% of ceiling")
        columns[label] = lambda row: f"{row.share:.0%}" if row.share else ""
    for peer in _peers(rows):
        columns[f"x {peer}"] = lambda row, peer=peer: f"{row.ratios[peer]:.2f}" if peer in row.ratios else ""
    if place == "gpu":
        columns["one call alone"] = lambda row: _time(row.alone)
        columns["host"] = lambda row: _time(row.host.get(_own(row)))
        for peer in dict.fromkeys(name for row in rows for name in row.host if name != _own(row)):
            columns[f"host of {peer}"] = lambda row, peer=peer: (
                format_seconds(row.host[peer]) if peer in row.host else ""
            )
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(text(row) for text in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def markdown_tables(results: list[Result], place: str = "cpu") -> str:
    """One table a suite. `place`: "cpu" or "gpu"."""
    suites = dict.fromkeys(result.suite for result in results)
    return "\n\n".join(_table(suite, [row for row in results if row.suite == suite], place) for suite in suites) + "\n"


def write_csv(path: Path, results: list[Result]) -> None:
    """One line for every contender of every row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for result in results:
            for name, spread in result.seconds.items():
                own = name not in result.ratios
                rate = [result.rate, result.unit, result.ceiling] if own else ["", "", ""]
                times = [spread.median, spread.low, spread.high, spread.rounds]
                writer.writerow([result.suite, result.name, name, *times, *rate, result.ratios.get(name, "")])


def draw(path: Path, title: str, results: list[Result]) -> None:
    """Bars: how many times as fast as torch's SDPA, and the share of the ceiling. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [result for result in results if result.ceiling][::-1]
    if not rows:
        return
    figure, axes = plt.subplots(1, 2, figsize=(14, 1.5 + 0.3 * len(rows)), sharey=True)
    places = range(len(rows))
    shares = axes[0].barh(places, [100 * row.share for row in rows], color="#4878a8")
    axes[0].bar_label(shares, fmt="%.0f", fontsize=7)
    axes[0].set_xlabel("% of the ceiling measured in the same run", fontsize=8)
    speeds = axes[1].barh(places, [row.ratios.get("torch SDPA", 1) for row in rows], color="#e1812c")
    axes[1].bar_label(speeds, fmt="%.1f", fontsize=7)
    axes[1].set_xscale("log")
    axes[1].axvline(1, color="grey", linewidth=0.8, linestyle=":")
    axes[1].set_xlabel("x torch SDPA", fontsize=8)
    axes[0].set_yticks(places, [row.name for row in rows], fontsize=7)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def write_all(
    folder: Path, stem: str, environment: dict[str, Any], results: list[Result], plot: bool = True
) -> list[Path]:
    """Write json, markdown, csv and, where matplotlib is, a plot. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("json", "md", "csv")]
    paths[0].write_text(to_json(environment, results))
    place = "gpu" if "gpu" in environment else "cpu"
    paths[1].write_text(f"{describe(environment)}\n\n{markdown_tables(results, place)}")
    write_csv(paths[2], results)
    if not plot:
        return paths
    try:
        picture = folder / f"{stem}.png"
        draw(picture, f"{environment['cpu']}, {environment['threads']} threads, {environment['cpu_level']}", results)
        paths += [picture] * picture.is_file()
    except ModuleNotFoundError:
        pass
    return paths
