"""Logits of "tbq4" against the same model with `flashq.reference` over the same planes, and of "fq" against eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import ON_CUDA, plain_dtype
from small_models import MODELS, make, prompt
from torch import Tensor

import flashq
from flashq.caches import TBQ4Cache

fq = pytest.importorskip("flashq.integrations.transformers")

CUDA = [pytest.param(False, "cuda", marks=pytest.mark.cuda)] if "tbq4_attention" in ON_CUDA else []


def steps(model: Any, cache: Any = None) -> Iterator[Tensor]:
    """Logits of a padded prompt in two parts, of single tokens, and of some after a roll-back and a change of rows;
    without a cache of all tokens anew every time."""
    ids, mask = (x.to(model.device) for x in prompt(batch=3, tokens=150).values())
    done = 0
    for count in (100, 30, 1, 1, -2, 4, 0, 1, 1):
        if count < 0 and cache is not None:
            cache.crop(count)
        elif count == 0:
            rows = torch.tensor([2, 0, 2], device=ids.device)
            if cache is not None:
                cache.reorder_cache(rows)
            ids, mask = ids[rows], mask[rows]
        elif count > 0 and cache is None:
            yield model(ids[:, : done + count], attention_mask=mask[:, : done + count], use_cache=False).logits[
                :, done:
            ]
        elif count > 0:
            new, keyword = ids[:, done : done + count], {fq.cache_keyword(model): cache}
            yield model(new, attention_mask=mask[:, : done + count], **keyword).logits
        done += count


def check_logits(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Relative, for every step. The first row's padding has no keys, and nobody reads its logits."""
    for x, y in zip(ours, theirs, strict=True):
        for part in (x[:, -1], y[:, -1]), (x[1:], y[1:]):
            a, b = (logits.cpu() for logits in part)
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3"])
@pytest.mark.parametrize(
    ("plain", "device"),
    [(False, "cpu"), (True, "cpu"), *CUDA],
)
def test_logits_are_those_of_the_reference(
    name: str, plain: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name).to(device)
    fq.enable(model, "tbq4")
    options = {"page_offsets": False, "exact_first": 0, "exact_last": 0} if plain else {"exact_last": 20}
    options["dtype"] = plain_dtype(model.device)
    written: list[tuple[Tensor, Tensor]] = []
    write = TBQ4Cache._write

    def record(self: TBQ4Cache, layer: int, chunk: Any, k: Tensor, v: Tensor) -> None:
        written.append((k.clone(), v.clone()))
        write(self, layer, chunk, k, v)

    def replay(self: TBQ4Cache, layer: int, chunk: Any, k: Tensor, v: Tensor) -> None:
        write(self, layer, chunk, *written.pop(0))

    def eager(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        on_cpu = [x.cpu() if isinstance(x, Tensor) else x for x in (q, *args)]
        out, lse = flashq.reference.tbq4_attention(*on_cpu, **options)
        return out.to(q.device, options.get("out_dtype") or q.dtype), lse.to(q.device)

    class Ops:
        """torch.ops.flashq, but for attention."""

        def __getattr__(self, name: str) -> Any:
            return eager if name == "tbq4_attention" else getattr(ops, name)

    ops = torch.ops.flashq
    with torch.inference_mode():
        monkeypatch.setattr(TBQ4Cache, "_write", record)
        logits = list(steps(model, fq.make_cache(model, "tbq4", **options)))
        monkeypatch.setattr(TBQ4Cache, "_write", replay)
        monkeypatch.setattr(torch.ops, "flashq", Ops())
        reference = list(steps(model, fq.make_cache(model, "tbq4", **options)))
    assert not written
    check_logits(logits, reference, 1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_logits_of_16_bits_are_eagers(name: str, device: str) -> None:
    """From a cache of the device's plain dtype, while the model stays in fp32."""
    model = make(name)
    with torch.inference_mode():
        eager = list(steps(model))
        model.to(device)
        fq.enable(model, "16bit")
        dtype = plain_dtype(model.device)
        logits = list(steps(model, fq.make_cache(model, "16bit", dtype=dtype)))
    check_logits(logits, eager, 1e-4 if dtype == torch.float32 else 1e-2)


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
