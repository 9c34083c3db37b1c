"""`python -m flashq demo`: attention over real keys and values, from every kind of cache, against eager attention."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flashq
from flashq.caches import PagedCache
from flashq.caches.pages import count_pages
from flashq.cli import demo_model
from flashq.cli.capture import CAPTURES, Capture, load_capture
from flashq.cli.machine import cpu_levels
from flashq.cli.output import progress_bar
from flashq.cli.timing import format_bytes, format_seconds, medians, take_turns, times_as_fast

LONG = 16384  # tokens of the second timing: the captured ones, repeated

PAGE_SIZE = 64
NO_EXACT_TOKENS = {"exact_first": 0, "exact_last": 0}
CACHES: dict[str, Callable[..., PagedCache]] = {
    "decode, 16-bit": flashq.PagedKVCache,
    "decode, TBQ4": partial(flashq.TBQ4Cache, page_offsets=False, **NO_EXACT_TOKENS),
    "+ page offsets": partial(flashq.TBQ4Cache, **NO_EXACT_TOKENS),
    "+ exact tokens": flashq.TBQ4Cache,
}
PREFILL = "prefill, 16-bit"
FULL, PLAIN, OFFSETS, EXACT = CACHES


@dataclass
class Timing:
    """One decode step (of prefill: one call) at a number of tokens in the cache."""

    tokens: int
    cache_bytes: int
    """Of the cache; for prefill of k and v."""
    seconds: float
    times_torch: float


@dataclass
class Row:
    """What one way to attend gives: error, and figures at the captured and at the long context."""

    method: str
    error: float
    timings: list[Timing]


@dataclass
class Layer:
    """The figures of one captured layer."""

    name: str
    title: str
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    queries: int
    rows: list[Row]

    def row(self, method: str) -> Row:
        return next(row for row in self.rows if row.method == method)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference|, L2 over everything."""
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def make_cache(method: str, k: Tensor) -> PagedCache:
    """A cache of one layer with one empty sequence, and room for keys k (T, Hkv, D)."""
    tokens, kv_heads, head_dim = k.shape
    cache = CACHES[method](
        1, kv_heads, head_dim, num_pages=count_pages(tokens, PAGE_SIZE), page_size=PAGE_SIZE, max_sequences=1,
        dtype=k.dtype, device=k.device,
    )  # fmt: skip
    cache.alloc()
    return cache


def append(cache: PagedCache, k: Tensor, v: Tensor) -> None:
    """k, v (T, Hkv, D) become the next T tokens."""
    cache.extend(cache.sequences, len(k)).append(0, k, v)


def generate(cache: PagedCache, capture: Capture) -> Tensor:
    """Append the prompt at once, then every further token and its query one by one -> outputs (queries, Hq, D)."""
    prompt = len(capture.k) - len(capture.q)
    append(cache, capture.k[:prompt], capture.v[:prompt])
    new = zip(capture.q.split(1), capture.k[prompt:].split(1), capture.v[prompt:].split(1), strict=True)
    return torch.cat([cache.extend(cache.sequences).attend(0, q, k, v)[0] for q, k, v in new])


def torch_calls(k: Tensor, v: Tensor, q: Tensor) -> dict[str, Callable[[], Tensor]]:
    """torch's own attention of the last S queries q (S, Hq, D) over k, v (T, Hkv, D), in the layout it likes best.

    There are two ways to write it with grouped heads, and which one is faster depends on shape, dtype and device.
    """
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    mask = grouped_mask = None
    if q.shape[2] > 1:  # its is_causal aligns top-left, so the mask has to be written out
        mask = flashq.reference.visible_keys(q.shape[2], k.shape[2], causal=True).to(q.device)
        grouped_mask = mask.repeat(group, 1)
    calls = {"torch": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=group > 1)}
    if group > 1:
        rows = q.reshape(1, k.shape[1], -1, q.shape[3])
        calls["torch, a group's heads as rows"] = lambda: F.scaled_dot_product_attention(
            rows, k, v, attn_mask=grouped_mask
        ).view(q.shape)
    return calls


def faster_than_torch(taken: dict[str, list[float]], name: str) -> float:
    """How many times as fast as the fastest of `torch_calls`."""
    return min(times_as_fast(taken, name, other) for other in taken if other.startswith("torch"))


def time_steps(
    caches: dict[str, PagedCache], k: Tensor, v: Tensor, q: Tensor, device: str, seconds: float
) -> dict[str, Timing]:
    """Time one decode step, query q (1, Hq, D), from each filled cache, in turns with torch over k, v (T, Hkv, D)."""
    calls = {name: partial(cache.lookup(cache.sequences).attend, 0, q[None]) for name, cache in caches.items()}
    taken = take_turns({**torch_calls(k, v, q), **calls}, seconds=seconds, device=device)
    return {
        name: Timing(len(k), cache.nbytes_in_use, medians(taken)[name], faster_than_torch(taken, name))
        for name, cache in caches.items()
    }


def measure(capture: Capture, device: str = "cpu", *, long: int = LONG, seconds: float = 1.0) -> Iterator[str | Layer]:
    """Run one capture through everything; yield what is about to happen, and at last the Layer with the figures."""
    tokens, kv_heads, head_dim = capture.k.shape
    queries, q_heads, _ = capture.q.shape
    yield "eager attention"
    eager, _ = flashq.reference.prefill(capture.q[None], capture.k[None], capture.v[None], causal=True)
    capture = capture._replace(q=capture.q.to(device), k=capture.k.to(device), v=capture.v.to(device))
    eager = eager[0].to(device)

    yield "prefill"
    prefill = partial(flashq.prefill, capture.q[None], capture.k[None], capture.v[None], causal=True)
    peers = torch_calls(capture.k, capture.v, capture.q)
    taken = take_turns({**peers, "flashq": prefill}, seconds=seconds / 2, device=device)
    kv_bytes = capture.k.nbytes + capture.v.nbytes
    timing = Timing(tokens, kv_bytes, medians(taken)["flashq"], faster_than_torch(taken, "flashq"))
    rows = [Row(PREFILL, relative_error(prefill()[0][0], eager), [timing])]

    caches = {}
    for name in CACHES:
        yield name
        caches[name] = make_cache(name, capture.k)
        rows.append(Row(name, relative_error(generate(caches[name], capture), eager), []))
    yield f"timing at {tokens} tokens"
    timings = time_steps(caches, capture.k, capture.v, capture.q[-1:], device, seconds)

    yield f"filling caches of {long} tokens"
    k, v = (x.repeat(-(-long // tokens), 1, 1)[:long].contiguous() for x in (capture.k, capture.v))
    for name in CACHES:
        caches[name] = make_cache(name, k)
        append(caches[name], k[:-1], v[:-1])
        append(caches[name], k[-1:], v[-1:])  # releases exact tokens of before
    yield f"timing at {long} tokens"
    long_timings = time_steps(caches, k, v, capture.q[-1:], device, seconds)
    for row in rows[1:]:
        row.timings += [timings[row.method], long_timings[row.method]]
    yield Layer(capture.name, capture.title, q_heads, kv_heads, head_dim, tokens, queries, rows)


def format_times(value: float) -> str:
    """1.234 -> "1.2", 12.34 -> "12"."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def opening_words() -> str:
    """What is about to be measured, for somebody who does not know the caches."""
    return (
        "Attention of two language models, one layer each, over the queries, keys and values that they computed for "
        "352 tokens of English (they come with flashq). A model that writes text keeps all keys and values in a cache, "
        "and reads all of it for every further token. The caches compared:"
    )


def cache_kinds() -> Table:
    """What each cache holds."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in {
        "16-bit": "keys and values as the model computed them, in fp16",
        "TBQ4": "4 bits a value: every vector rotated, rounded to 16 levels, and its norm in fp16",
        "+ page offsets": f"TBQ4 of keys less one vector for each page of {PAGE_SIZE} tokens: about the page's mean",
        "+ exact tokens": "the same, and the first 4 and last 64 tokens in fp16 as well",
    }.items():
        table.add_row(name, text)
    return table


def make_table(layer: Layer) -> Table:
    """The layer's figures as a table for people, narrow enough for 80 columns."""
    short, long = (timing.tokens for timing in layer.row(FULL).timings)
    heads = f"{layer.q_heads} query heads, {layer.kv_heads} KV heads, head dim {layer.head_dim}"
    table = Table(
        title=f"{layer.title}: {heads}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in (
        "",
        "error",
        f"time at\n{short}",
        "speed,\nx torch",
        f"cache at\n{long}",
        "",
        f"time at\n{long}",
        "speed,\nx torch",
    ):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    full_bytes = layer.row(FULL).timings[-1].cache_bytes
    for row in layer.rows:
        cells = [row.method, "<0.001" if row.error < 1e-3 else f"{row.error:.2g}"]
        for index, timing in enumerate(row.timings):
            if index:
                cells += [format_bytes(timing.cache_bytes), f"{timing.cache_bytes / full_bytes:.0%}"]
            cells += [format_seconds(timing.seconds), format_times(timing.times_torch)]
        table.add_row(*cells)
    return table


def closing_words(layers: list[Layer], device: str) -> str:
    """What the figures mean, with the figures that were measured."""
    hard = layers[0]
    plain, offsets, exact = (hard.row(name) for name in (PLAIN, OFFSETS, EXACT))
    step = exact.timings[-1]
    saved = hard.row(FULL).timings[-1].cache_bytes / step.cache_bytes
    return (
        f"error: relative L2 distance of {hard.queries} tokens' outputs to eager fp32 attention on the same inputs; 1 "
        f"is as far off as answering zero. time: of one decode step, the attention of one new token over a cache of "
        f"{hard.tokens} or {step.tokens} tokens, on {device} (prefill: of {hard.queries} queries at once). x torch: "
        f"how many times as fast as scaled_dot_product_attention over the 16-bit keys, in the faster of its two forms "
        f"(enable_gqa, or a group's heads as rows of one query). The {step.tokens} tokens are the {hard.tokens}, "
        f"repeated. Times mean little while other programs run.\n\n"
        f"So what: in {hard.title}, every key holds the same large constant, and plain 4-bit keys put the output off "
        f"by {plain.error:.2g}. Page offsets bring that to {offsets.error:.2g} and exact tokens to {exact.error:.2g}, "
        f"in a cache {saved:.1f} times smaller than 16 bits; a step over {step.tokens} tokens then takes "
        f"{format_seconds(step.seconds)}, {format_times(step.times_torch)} times as fast as torch over 16 bits."
    )


def device_name(device: str) -> str:
    """The device and its threads, for people."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"this CPU with {threads} thread{'s' * (threads > 1)}"


def measure_all(device: str) -> list[Layer]:
    """Measure every capture, with a progress bar on the terminal."""
    layers: list[Layer] = []
    with torch.inference_mode(), progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(CAPTURES) * (len(CACHES) + 5))
        for name in CAPTURES:
            for step in measure(load_capture(name), device):
                progress.advance(task)
                if isinstance(step, Layer):
                    layers.append(step)
                else:
                    progress.update(task, description=f"{CAPTURES[name]}: {step}")
    return layers


def run_layers(console: Console, device: str) -> list[Layer] | None:
    """Measure and print the captured layers; None where the device lacks an op."""
    console.print(opening_words(), highlight=False)
    console.print(cache_kinds())
    console.print()
    try:
        layers = measure_all(device)
    except RuntimeError as error:
        if device == "cuda" and str(error).startswith("flashq::"):  # an op that CUDA does not have
            console.print(f"flashq demo: {error}", style="red", markup=False, soft_wrap=True)
            return None
        raise
    for layer in layers:
        console.print(make_table(layer))
        console.print()
    console.print(closing_words(layers, device_name(device)), markup=False, highlight=False)
    return layers


def run(
    *, device: str = "cpu", plot: Path | None = None, json_path: Path | None = None, model_only: bool = False
) -> int:
    """Print all there is to show; 2 where the device, its ops or a package are not there, else 0."""
    console = Console()
    if device == "cuda" and not torch.cuda.is_available():
        console.print("flashq demo: --device cuda: expected a GPU that torch can use, found none", style="red")
        return 2
    if plot is not None and not model_only:
        try:
            from flashq.cli.demo_plot import draw, endings
        except ModuleNotFoundError as error:
            message = f"flashq demo: --plot needs {error.name}: pip install matplotlib"
            console.print(message, style="red", markup=False, soft_wrap=True)
            return 2
        if plot.suffix.removeprefix(".").lower() not in endings():
            message = f"flashq demo: --plot: expected a name that ends like .png or .svg, got {plot}"
            console.print(message, style="red", markup=False, soft_wrap=True)
            return 2
    if device == "cpu" and cpu_levels().selected is None:
        message = f"flashq demo: FLASHQ_CPU_ISA: expected one of {', '.join(cpu_levels().available)}"
        console.print(message, style="red", markup=False, soft_wrap=True)
        return 2
    layers: list[Layer] = []
    if not model_only:
        measured = run_layers(console, device)
        if measured is None:
            return 2
        layers = measured
        console.print()
    runs: list[demo_model.Run] = []
    if model_only or not demo_model.missing():
        found = demo_model.run(console, device)
        if found is None:
            return 2
        runs = found
    else:
        message = f"The same in a whole language model: {demo_model.INSTALL}, then python -m flashq demo --model"
        console.print(message, markup=False, highlight=False)
    if json_path is not None:
        facts: dict[str, Any] = {
            "flashq": flashq.__version__,
            "torch": torch.__version__,
            "device": device_name(device),
        }
        facts["layers"], facts["model"] = ([asdict(item) for item in items] for items in (layers, runs))
        json_path.write_text(json.dumps(facts, indent=1) + "\n")
        print(f"figures: {json_path}", file=sys.stderr)
    if plot is not None and layers:
        draw(layers, plot)
        print(f"plot: {plot}", file=sys.stderr)
    return 0
