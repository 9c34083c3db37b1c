"""The demo's figures, on the real keys and values that come with the package."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashq
from flashq.cli import demo, demo_caches, demo_model, main
from flashq.cli.capture import CAPTURES, Capture, load_capture
from flashq.cli.demo import CACHES, EXACT, FULL, OFFSETS, PLAIN, PREFILL, Layer, generate, relative_error
from flashq.tbq4 import page_offsets


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
    tokens, kv_heads, head_dim = capture.k.shape
    expected, _ = flashq.reference.prefill(capture.q[None], capture.k[None], capture.v[None], causal=True)
    cache = CACHES[method](tokens, kv_heads, head_dim, capture.q.dtype, "cpu")
    return relative_error(generate(cache, capture), expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hard_layer_needs_page_offsets(dtype: torch.dtype) -> None:
    capture = capture_in("qwen_layer0", dtype)
    assert error_of(FULL, capture) < (1e-3 if dtype == torch.float16 else 1e-2)
    assert error_of(PLAIN, capture) > 0.9
    assert error_of(OFFSETS, capture) <= 0.11
    assert error_of(EXACT, capture) <= 0.015


@pytest.mark.parametrize("method", [PLAIN, OFFSETS, EXACT])
def test_errors_are_those_of_the_format_and_not_of_the_kernel(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = capture_in("qwen_layer0", torch.bfloat16)
    error = error_of(method, capture)
    monkeypatch.setattr(flashq, "tbq4_attention", flashq.reference.tbq4_attention)
    assert error == pytest.approx(error_of(method, capture), rel=0.05)


@pytest.mark.parametrize("method", [OFFSETS, EXACT])
def test_zero_offset_on_the_first_page_loses_everything(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_zero_first(*arguments: object) -> tuple[int, torch.Tensor]:
        first, offsets = page_offsets(*arguments)
        if first == 0:
            offsets[0] = 0
        return first, offsets

    monkeypatch.setattr(demo_caches, "page_offsets", with_zero_first)
    assert error_of(method, load_capture("qwen_layer0")) > 0.9


def test_ordinary_layer_improves_with_every_step() -> None:
    capture = load_capture("smollm2_layer5")
    plain, offsets, exact = (error_of(method, capture) for method in (PLAIN, OFFSETS, EXACT))
    assert 0.2 > plain > offsets > 1.5 * exact


def test_exact_pool_stays_small() -> None:
    cache = CACHES[EXACT](4096, 2, 128, torch.float16, "cpu")
    full = CACHES[FULL](4096, 2, 128, torch.float16, "cpu")
    assert cache.exact_k.shape[0] * cache.exact_k.shape[1] == 96
    assert full.bytes() > 3.3 * cache.bytes()


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
