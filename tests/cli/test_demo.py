"""The demo's figures, on the real keys and values that come with the package."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashq
from flashq.cli import demo, demo_model, main
from flashq.cli.capture import CAPTURES, Capture, load_capture
from flashq.cli.demo import (
    CACHES,
    EXACT,
    FULL,
    OFFSETS,
    PLAIN,
    PREFILL,
    Layer,
    append,
    generate,
    make_cache,
    relative_error,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The eager reference takes many small steps, which only get slower when two threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's part of the demo has tests of its own."""
    monkeypatch.setattr(demo_model, "missing", lambda: ["transformers"])


def capture_in(name: str, dtype: torch.dtype) -> Capture:
    capture = load_capture(name)
    return capture._replace(q=capture.q.to(dtype), k=capture.k.to(dtype), v=capture.v.to(dtype))


def error_of(method: str, capture: Capture) -> float:
    """Relative error to fp32 eager attention on the same inputs."""
    expected, _ = flashq.reference.prefill(capture.q[None], capture.k[None], capture.v[None], causal=True)
    return relative_error(generate(make_cache(method, capture.k), capture), expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hard_layer_needs_page_offsets(dtype: torch.dtype) -> None:
    capture = capture_in("qwen_layer0", dtype)
    assert error_of(FULL, capture) < (1e-3 if dtype == torch.float16 else 1e-2)
    assert error_of(PLAIN, capture) > 0.9
    assert error_of(OFFSETS, capture) <= 0.11
    assert error_of(EXACT, capture) <= 0.015


def test_ordinary_layer_improves_with_every_step() -> None:
    capture = load_capture("smollm2_layer5")
    plain, offsets, exact = (error_of(method, capture) for method in (PLAIN, OFFSETS, EXACT))
    assert 0.2 > plain > offsets > 1.5 * exact


def test_the_exact_tokens_are_few_of_many() -> None:
    k = torch.zeros(4096, 2, 128, dtype=torch.float16)
    full, exact = (make_cache(method, k) for method in (FULL, EXACT))
    for cache in (full, exact):
        append(cache, k[:-1], k[:-1])
        append(cache, k[-1:], k[-1:])
    assert full.nbytes_in_use == 2 * k.nbytes
    assert exact.pages_in_use["exact pages"][0] <= 7
    assert full.nbytes_in_use > 3.3 * exact.nbytes_in_use


def measured(name: str) -> Layer:
    with torch.inference_mode():
        *steps, layer = demo.measure(load_capture(name), long=512, seconds=0.01)
    assert all(isinstance(step, str) for step in steps)
    return layer


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [measured(name) for name in CAPTURES]


def test_every_row_has_its_figures(layers: list[Layer]) -> None:
    for layer in layers:
        assert [row.method for row in layer.rows] == [PREFILL, *CACHES]
        for row in layer.rows[1:]:
            assert [timing.tokens for timing in row.timings] == [352, 512]
            assert all(timing.seconds > 0 and timing.times_torch > 0 for timing in row.timings)
    assert layers[0].row(PREFILL).error < 1e-3
    closing = demo.closing_words(layers, "this CPU with 2 threads")
    assert f"{layers[0].row(EXACT).error:.2g}" in closing


@pytest.mark.cuda
def test_errors_on_cuda_are_those_on_the_cpu(layers: list[Layer]) -> None:
    with torch.inference_mode():
        *_, layer = demo.measure(load_capture("qwen_layer0"), "cuda", long=512, seconds=0.01)
    for ours, cpus in zip(layer.rows, layers[0].rows, strict=True):
        assert ours.error == pytest.approx(cpus.error, rel=0.05, abs=1e-3), ours.method


def test_command_prints_tables_and_writes_files(
    layers: list[Layer], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    ready = iter(layers)
    monkeypatch.setattr(demo, "measure", lambda capture, device: iter(["a step", next(ready)]))
    files = {"--plot": tmp_path / "demo.png", "--json": tmp_path / "demo.json"}
    assert main.main(["demo", *(str(word) for pair in files.items() for word in pair)]) == 0
    out = capsys.readouterr().out
    for text in (*CAPTURES.values(), "page offsets", "x torch", "eager fp32 attention on"):
        assert text in out.replace("\n", " ")
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["--json"].read_text())["layers"][0]["rows"][0]["error"] == layers[0].rows[0].error


def test_missing_matplotlib_and_gpu_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "flashq.cli.demo_plot", raising=False)
    assert main.main(["demo", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["demo", "--device", "cuda"]) == 2
    assert "found none" in capsys.readouterr().out


def test_op_that_cuda_lacks_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> list[Layer]:
        raise RuntimeError("flashq::prefill: device: expected cpu, got cuda:0")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo, "measure_all", refuse)
    assert main.main(["demo", "--device", "cuda"]) == 2
    assert "flashq::prefill: device" in capsys.readouterr().out
