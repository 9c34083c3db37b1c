"""Logits of "tbq4" against the same model with `flashq.reference` over the same planes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import MODELS, make, prompt
from torch import Tensor

import flashq
from flashq.caches import TBQ4Cache

fq = pytest.importorskip("flashq.integrations.transformers")


def steps(model: Any, cache: Any) -> Iterator[Tensor]:
    """Logits of a padded prompt in two parts, of single tokens, and of some after a roll-back and a change of rows."""
    inputs = prompt(batch=3, tokens=150)
    ids, mask, done = inputs["input_ids"], inputs["attention_mask"], 0
    for count in (100, 30, 1, 1, -2, 4, 0, 1, 1):
        if count < 0:
            cache.crop(count)
        elif count == 0:
            rows = torch.tensor([2, 0, 2])
            cache.reorder_cache(rows)
            ids, mask = ids[rows], mask[rows]
        else:
            yield model(
                ids[:, done : done + count], attention_mask=mask[:, : done + count], **{fq.cache_keyword(model): cache}
            ).logits
        done += count


@pytest.mark.parametrize("plain", [False, True], ids=["default", "plain"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3"])
def test_logits_are_those_of_the_reference(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    fq.enable(model, "tbq4")
    options = {"page_offsets": False, "exact_first": 0, "exact_last": 0} if plain else {"exact_last": 20}
    written: list[tuple[Tensor, Tensor]] = []
    write = TBQ4Cache._write

    def record(self: TBQ4Cache, layer: int, chunk: Any, k: Tensor, v: Tensor) -> None:
        written.append((k.clone(), v.clone()))
        write(self, layer, chunk, k, v)

    def replay(self: TBQ4Cache, layer: int, chunk: Any, k: Tensor, v: Tensor) -> None:
        write(self, layer, chunk, *written.pop(0))

    class Ops:
        """torch.ops.flashq, but for attention."""

        def __getattr__(self, name: str) -> Any:
            return flashq.reference.tbq4_attention if name == "tbq4_attention" else getattr(ops, name)

    ops = torch.ops.flashq
    with torch.inference_mode():
        monkeypatch.setattr(TBQ4Cache, "_write", record)
        logits = list(steps(model, fq.make_cache(model, "tbq4", **options)))
        monkeypatch.setattr(TBQ4Cache, "_write", replay)
        monkeypatch.setattr(torch.ops, "flashq", Ops())
        reference = list(steps(model, fq.make_cache(model, "tbq4", **options)))
    assert not written
    for ours, theirs in zip(logits, reference, strict=True):
        # The first row's padding has no keys, and nobody reads its logits.
        for x, y in ((ours[:, -1], theirs[:, -1]), (ours[1:], theirs[1:])):
            assert (x - y).norm() <= 1e-3 * y.norm()


def exact_cache(model: Any) -> Any:
    """The 16-bit cache, whose attention is exact in fp32."""
    fq.enable(model, "16bit")
    return fq.make_cache(model, "16bit")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_the_4_bit_error_shows(name: str) -> None:
    """Plain 4 bits move the logits, exact tokens and offsets less: the planes are what attention reads."""
    model = make(name)
    with torch.inference_mode():
        exact = torch.cat(list(steps(model, exact_cache(model))), 1)
        errors = []
        fq.enable(model, "tbq4")
        for options in ({"page_offsets": False, "exact_first": 0, "exact_last": 0}, {}):
            ours = torch.cat(list(steps(model, fq.make_cache(model, "tbq4", **options))), 1)
            errors.append((ours[1:] - exact[1:]).norm().item() / exact[1:].norm().item())
    assert errors[0] > 3e-3
    assert errors[1] < errors[0]
