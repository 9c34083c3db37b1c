"""`generate` of small models: "fq" in fp32 writes what eager attention writes, from either cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ON_CUDA
from small_models import MODELS, make, prompt
from torch import Tensor

fq = pytest.importorskip("flashq.integrations.transformers")

Generate = Callable[..., Tensor]
NEW = {"max_new_tokens": 10, "do_sample": False}


def greedy(model: Any) -> Tensor:
    return model.generate(**prompt(device=model.device), **NEW)


def left_padded(model: Any) -> Tensor:
    return model.generate(**prompt(batch=3, device=model.device), **NEW)


def sampling(model: Any) -> Tensor:
    torch.manual_seed(5)
    inputs = prompt(device=model.device)
    return model.generate(**inputs, max_new_tokens=10, do_sample=True, num_return_sequences=3)


def beams(model: Any) -> Tensor:
    return model.generate(**prompt(batch=2, device=model.device), **NEW, num_beams=3)


def prompt_look_up(model: Any) -> Tensor:
    ids = prompt(device=model.device)["input_ids"].repeat(1, 2)[:, 20:100]  # something to look up
    return model.generate(ids, attention_mask=torch.ones_like(ids), **NEW, prompt_lookup_num_tokens=4)


def chunked_prefill(model: Any) -> Tensor:
    inputs = prompt(batch=2, device=model.device)
    return model.generate(**inputs, **NEW, prefill_chunk_size=7)  # the first chunk of a row is all padding


SCENARIOS = [greedy, left_padded, sampling, beams, prompt_look_up, chunked_prefill]


@pytest.mark.parametrize("name", MODELS)
def test_fq_writes_what_eager_writes(name: str) -> None:
    model = make(name)
    eager = [scenario(model) for scenario in SCENARIOS]
    model.set_attn_implementation("fq")  # over Transformers' own cache
    for scenario, expected in zip(SCENARIOS, eager, strict=True):
        assert torch.equal(scenario(model), expected), f"{scenario.__name__}, plain keys"
    model.set_attn_implementation("eager")
    fq.enable(model, "16bit", page_size=16)
    for scenario, expected in zip(SCENARIOS, eager, strict=True):
        assert torch.equal(scenario(model), expected), f"{scenario.__name__}, PagedKVCache"
    fq.disable(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(greedy(model), eager[0])


@pytest.mark.parametrize(
    ("name", "cache"), [(name, cache) for name in MODELS for cache in fq.CACHES if (name, cache) != ("phi3", "tbq4")]
)
def test_a_second_turn_goes_on_with_the_same_cache(name: str, cache: str) -> None:
    """Every token within the exact ones, so that 4 bits are no excuse either."""
    model = make(name)
    inputs = prompt(batch=2)
    question = torch.full((2, 5), 7)

    def ask(first: Tensor) -> dict[str, Tensor]:
        ids = torch.cat([first, question], 1)
        padding = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 70, dtype=torch.int64)], 1)
        return {"input_ids": ids, "attention_mask": padding}

    turn = ask(model.generate(**inputs, **NEW))
    expected = model.generate(**turn, **NEW)
    options = {"exact_last": 256} if cache == "tbq4" else {}
    fq.enable(model, cache)
    kept = fq.make_cache(model, cache, **options)
    first = model.generate(**inputs, **NEW, **{fq.cache_keyword(model): kept})
    assert torch.equal(first, turn["input_ids"][:, :-5])
    assert kept.get_seq_length() == first.shape[1] - 1
    second = model.generate(**turn, **NEW, **{fq.cache_keyword(model): kept})
    assert torch.equal(second, expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3"])
def test_every_way_to_generate_works_in_4_bits(name: str) -> None:
    """With all tokens exact the tokens are eager's; with the defaults, and without, there are others, but as many."""
    model = make(name)
    eager = [scenario(model) for scenario in SCENARIOS]
    fq.enable(model, "tbq4", exact_last=256)
    for scenario, expected in zip(SCENARIOS, eager, strict=True):
        assert torch.equal(scenario(model), expected), scenario.__name__
    fq.enable(model, "tbq4", page_offsets=False, exact_first=0, exact_last=0)
    for scenario, expected in zip(SCENARIOS, eager, strict=True):
        assert scenario(model).shape == expected.shape


@pytest.mark.cuda
@pytest.mark.parametrize("cache", ["16bit", *(["tbq4"] if "tbq4_attention" in ON_CUDA else [])])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_every_way_to_generate_works_on_cuda(name: str, cache: str) -> None:
    """From caches of fp16, tokens exact: greedy ones are eager's likeliest, or as likely as far as fp16 can tell."""
    model = make(name).to("cuda")
    fq.enable(model, cache, dtype=torch.float16, **({"exact_last": 256} if cache == "tbq4" else {}))
    written = {scenario: scenario(model) for scenario in SCENARIOS}
    fq.disable(model)
    for scenario in (greedy, left_padded, prompt_look_up, chunked_prefill):
        tokens = written[scenario]
        mask = torch.ones_like(tokens)
        if len(tokens) > 1:
            mask[:, :70] = prompt(batch=len(tokens), device=model.device)["attention_mask"]
        with torch.inference_mode():
            logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, -11:-1]
        short_of_best = logits.amax(-1) - logits.gather(-1, tokens[:, -10:, None])[..., 0]
        assert (short_of_best <= 0.02 * logits.std()).all(), scenario.__name__


def test_phi3_has_no_4_bit_cache() -> None:
    with pytest.raises(ValueError, match="head_dim: expected 64, 128 or 256 for a 4-bit cache, got 96"):
        fq.enable(make("phi3"), "tbq4")
