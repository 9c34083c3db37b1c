"""The demo's picture: error, size and speed of every cache, side by side. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

if TYPE_CHECKING:
    from flashq.cli.demo import Layer

COLOURS = ("#4878a8", "#e1812c")


def endings() -> frozenset[str]:
    """The names of files that `draw` can write end in one of these: png, svg, ..."""
    return frozenset(FigureCanvasAgg.get_supported_filetypes())


def draw(layers: list[Layer], path: Path) -> None:
    """Write three bar charts with a group for every cache and a bar for every layer."""
    methods = [row.method for row in layers[0].rows[1:]]
    long = layers[0].rows[1].timings[-1].tokens
    panels = {
        "relative error to eager fp32": lambda layer, row: row.error,
        f"cache, % of 16-bit, {long:,} tokens": lambda layer, row: (
            100 * row.timings[-1].cache_bytes / layer.rows[1].timings[-1].cache_bytes
        ),
        f"speed of a step, x torch SDPA, {long:,} tokens": lambda layer, row: row.timings[-1].times_torch,
    }
    figure, axes = plt.subplots(1, 3, figsize=(15, 5))
    width = 0.8 / len(layers)
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for index, layer in enumerate(layers):
            places = [place + (index - (len(layers) - 1) / 2) * width for place in range(len(methods))]
            values = [value(layer, layer.row(method)) for method in methods]
            bars = axis.bar(places, values, width, label=layer.title, color=COLOURS[index % len(COLOURS)])
            axis.bar_label(bars, fmt="%.2g" if axis is axes[0] else "%.3g", fontsize=8)
        axis.margins(x=0.03)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(methods)), methods, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[2].axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
