"""Results as json, csv, markdown and a plot."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.measure import Result
from flashq.cli.timing import format_seconds

HEADER = ["suite", "row", "contender", "median_s", "q1_s", "q3_s", "rounds", "rate", "unit", "ceiling", "x"]
UNITS = {"prefill": "% of the FMA peak", "decode": "% of the read probe", "tbq4": "% of the read probe", "codec": ""}


def file_stem(environment: dict[str, Any], suite: str) -> str:
    """cpu-amd-epyc-2t-avx2: what a result file is called."""
    words = [suite, environment["cpu"], f"{environment['threads']}t", environment["cpu_level"]]
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


def describe(environment: dict[str, Any]) -> str:
    """The header in two lines of text."""
    commit = str(environment["commit"]) + (" with local changes" if environment["dirty"] else "")
    return (
        f"{environment['date']}, flashq {environment['flashq']} ({commit}), torch {environment['torch']}, "
        f"Python {environment['python']}, {environment['compiler']}. {environment['cpu']}, {environment['cores']} "
        f"cores, {environment['threads']} threads, {environment['cpu_level']}; load {environment['load_average']:.1f} "
        f"at the start. Command: `{environment['command']}`."
    )


def _peers(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(peer for result in results for peer in result.ratios))


def markdown_tables(results: list[Result]) -> str:
    """One table a suite: a row's time, rate, share of the ceiling, and how many times as fast as each peer."""
    parts = []
    for suite in dict.fromkeys(result.suite for result in results):
        rows = [result for result in results if result.suite == suite]
        peers = _peers(rows)
        ceiling = [UNITS.get(suite) or "% of ceiling"] if any(row.ceiling for row in rows) else []
        header = [suite, "median", rows[0].unit, *ceiling, *(f"x {peer}" for peer in peers)]
        lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
        for row in rows:
            own = next(iter(row.seconds.values()))
            share = [f"{row.share:.0%}" if row.share else ""] if ceiling else []
            ratios = [f"{row.ratios[peer]:.2f}" if peer in row.ratios else "" for peer in peers]
            cells = [row.name, format_seconds(own.median), f"{row.rate:.3g}", *share, *ratios]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


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


def write_all(folder: Path, stem: str, environment: dict[str, Any], results: list[Result]) -> list[Path]:
    """Write the four files; the plot only where matplotlib is. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("json", "md", "csv")]
    paths[0].write_text(to_json(environment, results))
    paths[1].write_text(f"{describe(environment)}\n\n{markdown_tables(results)}")
    write_csv(paths[2], results)
    try:
        plot = folder / f"{stem}.png"
        draw(plot, f"{environment['cpu']}, {environment['threads']} threads, {environment['cpu_level']}", results)
        paths += [plot] * plot.is_file()
    except ModuleNotFoundError:
        pass
    return paths
