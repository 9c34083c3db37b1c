"""What the integration does not compute, it refuses by name; and the cache's own methods."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import make, prompt, transformers

import flashq

fq = pytest.importorskip("flashq.integrations.transformers")


@pytest.fixture
def model() -> Any:
    made = make("llama")
    fq.enable(made, "16bit")
    return made


def run(model: Any, cache: Any = None, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(**{"input_ids": prompt()["input_ids"]} | inputs, **{fq.cache_keyword(model): cache})


def generate(model: Any, **options: Any) -> Any:
    return model.generate(**prompt(), max_new_tokens=2, return_dict_in_generate=True, **options)


def holes() -> dict[str, Any]:
    inputs = prompt(batch=2)
    inputs["attention_mask"][1, 30] = 0
    return inputs


def right_padding() -> dict[str, Any]:
    inputs = prompt(batch=2)
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    return inputs


CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("attention_mask: expected padding at the left only", lambda m: run(m, **holes())),
    ("attention_mask: expected padding at the left only", lambda m: run(m, **right_padding())),
    ("attention_mask: expected None or a 2-D padding mask, .* got a tensor of shape",
     lambda m: run(m, attention_mask=torch.zeros(1, 1, 70, 70))),
    (r"attention_mask: expected shape \(1, 70\)", lambda m: run(m, attention_mask=torch.ones(1, 71))),
    ("mask: expected causal, .* got and_masks",
     lambda m: run(m, position_ids=torch.arange(35).repeat(2)[None], use_cache=False)),  # two packed sequences
    ("cache: expected one that grows, got one of fixed length 128",
     lambda m: run(m, transformers.StaticCache(config=m.config, max_cache_len=128))),
    ("cache: expected one that 'fq' reads, got TBQ4ModelCache", lambda m: run(m, fq.make_cache(m, "tbq4"))),
    ("relative_bias: expected None", lambda m: run(m, relative_bias=torch.zeros(3))),
    ("cu_seq_lens_q: expected None", lambda m: run(m, cu_seq_lens_q=torch.zeros(3))),
    ("cache: expected 'tbq4' or '16bit', got 'int8'", lambda m: fq.enable(m, "int8")),
    ("options: expected max_chunk, .*, got page_sise", lambda m: fq.enable(m, "16bit", page_sise=16)),
    ("options: expected .*, got exact_last", lambda m: fq.enable(m, "16bit", exact_last=16)),
    ("options: expected .*, got window_left", lambda m: fq.make_cache(m, "tbq4", window_left=8)),
    ("model: expected a model of Transformers, got Linear", lambda m: fq.enable(torch.nn.Linear(2, 2))),
    ("model: expected a decoder of attention layers, got RwkvConfig",
     lambda m: fq.enable(transformers.RwkvForCausalLM(
         transformers.RwkvConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2)))),
    ("max_length: expected an integer, got 2.5", lambda m: fq.make_cache(m, "tbq4", max_length=2.5)),
    ("page_size: expected at least 1, got 0", lambda m: fq.make_cache(m, "tbq4", page_size=0)),
    ("layers: expected a model of 1, for which it was made, got layer 1",
     lambda m: run(m, fq.make_cache(make("llama", num_hidden_layers=1), "16bit"))),
    ("output_attentions: expected None, got True", lambda m: run(m, output_attentions=True)),
    ("output_attentions: expected None, got True", lambda m: generate(m, output_attentions=True)),
    ("Passing both `cache_implementation`", lambda m: generate(m, cache_implementation="static")),
    ("Passing both `cache_implementation`", lambda m: generate(m, cache_implementation="offloaded")),
    ("Passing both `cache_implementation`",
     lambda m: m.generate(prompt()["input_ids"], transformers.GenerationConfig(cache_implementation="static"))),
    ("use_cache: expected True with a PagedKVModelCache, got False",
     lambda m: generate(m, use_cache=False, **{fq.cache_keyword(m): fq.make_cache(m, "16bit")})),
    ("use_cache: expected True with a PagedKVModelCache, got None",
     lambda m: generate(m, use_cache=None, **{fq.cache_keyword(m): fq.make_cache(m, "16bit")})),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), CALLS)
def test_refused(model: Any, message: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call(model)


def test_4_bits_need_their_cache(model: Any) -> None:
    fq.enable(model, "tbq4")
    with pytest.raises(ValueError, match="cache: expected a TBQ4ModelCache"):
        run(model)
    with pytest.raises(ValueError, match="cache: expected a TBQ4ModelCache"):
        model.generate(**prompt(), max_new_tokens=2, use_cache=False)


@pytest.mark.parametrize("where", ["argument", "config", "positional config", "the model's config"])
def test_generate_without_a_cache(model: Any, where: str) -> None:
    """Not with one that it does not know of: every step then brings all tokens."""
    inputs, config = prompt(), transformers.GenerationConfig(max_new_tokens=5, use_cache=False)
    expected = make("llama").generate(**inputs, max_new_tokens=5, use_cache=False)
    if where == "argument":
        ours = model.generate(**inputs, max_new_tokens=5, use_cache=False)
    elif where == "config":
        ours = model.generate(**inputs, generation_config=config)
    elif where == "positional config":
        ours = model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])
    else:
        model.generation_config.use_cache = False
        ours = model.generate(**inputs, generation_config=transformers.GenerationConfig(max_new_tokens=5))
    assert torch.equal(ours, expected)


@pytest.mark.slow
def test_continuous_batching_of_transformers_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"not supported"):
        model.generate_batch([[3, 4, 5]], generation_config=transformers.GenerationConfig(max_new_tokens=2))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention_functions_cannot_read_the_caches(model: Any, attention: str) -> None:
    fq.disable(model)
    model.set_attn_implementation(attention)
    for cache in fq.CACHES:
        with pytest.raises(NotImplementedError, match=r"call flashq.integrations.transformers.enable"):
            run(model, fq.make_cache(model, cache))


def test_gradients_and_dropout_are_refused(model: Any) -> None:
    with pytest.raises(RuntimeError, match="flashq::"):
        model(prompt()["input_ids"])
    trained = make("llama", attention_dropout=0.1).train()
    fq.enable(trained, "16bit")
    with pytest.raises(ValueError, match="dropout: expected 0"):
        run(trained)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = make("gemma3", use_bidirectional_attention=True)
    fq.enable(model, "16bit")
    with pytest.raises(ValueError, match=r"mask: expected causal|is_causal: expected True"):
        run(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: .* got chunked_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window: expected a number of tokens, got None",
        ),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers: expected layers with keys of their own"),
        ({"is_encoder_decoder": True}, "model: expected a decoder"),
        ({"head_dim": 264}, "head_dim: expected a multiple of 8 up to 256, got 264"),
    ],
)
def test_models_that_flashq_cannot_compute_are_refused(model: Any, changes: dict[str, Any], message: str) -> None:
    fq.disable(model)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        fq.enable(model, "16bit")
    assert model.config._attn_implementation == "eager"
    assert "generate" not in vars(model)


def test_a_window_that_config_and_mask_disagree_on_is_refused() -> None:
    model = make("mistral")
    fq.enable(model, "tbq4")
    cache = fq.make_cache(model)
    cache.windows[1] = -1
    with pytest.raises(ValueError, match="sliding_window: expected window_left -1 in layer 1, got 23"):
        run(model, cache)
    with pytest.raises(ValueError, match="layers: expected tokens in every layer before the next call"):
        run(model, cache)
    cache.reset()
    cache.windows[1] = 23
    assert run(model, cache).logits.isfinite().all()
    model = make("gemma2")
    fq.enable(model, "16bit")
    model.model.layers[0].self_attn.sliding_window = 12
    with pytest.raises(ValueError, match="sliding_window: expected the mask's"):
        run(model)


@pytest.mark.parametrize("cache", ["16bit", "tbq4"])
def test_padding_and_batches_must_stay(model: Any, cache: str) -> None:
    fq.enable(model, cache)
    kept = fq.make_cache(model, cache)
    inputs = prompt(batch=2)
    run(model, kept, **inputs)
    token = torch.full((2, 1), 5)
    with pytest.raises(ValueError, match="attention_mask: expected padding as before, 11 tokens"):
        run(model, kept, input_ids=token)
    with pytest.raises(ValueError, match="batch size: expected 2, got 3"):
        run(model, kept, input_ids=torch.full((3, 1), 5))
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1)], 1)
    assert run(model, kept, input_ids=token, attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("cache", ["16bit", "tbq4"])
def test_methods_of_the_cache(model: Any, cache: str) -> None:
    fq.enable(model, cache)
    ids = torch.randint(2, 100, (2, 600), generator=torch.Generator().manual_seed(3))
    kept = fq.make_cache(model, cache, page_size=16, max_chunk=64)
    assert (kept.nbytes, kept.get_seq_length(), kept.batch_size, kept.is_initialized) == (0, 0, -1, False)
    for begin, end in ((0, 30), (30, 31), (31, 500)):  # the last is more than there was room for
        run(model, kept, input_ids=ids[:, begin:end])
    assert (kept.get_seq_length(), kept.batch_size, len(kept)) == (500, 2, 2)
    twin = copy.deepcopy(kept)
    after = run(model, kept, input_ids=ids[:, 500:504]).logits
    kept.crop(-3)
    again = run(model, kept, input_ids=ids[:, 501:504]).logits
    torch.testing.assert_close(after[:, 1:], again, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run(model, twin, input_ids=ids[:, 500:504]).logits, after, rtol=0, atol=0)
    kept.crop(500)  # as many tokens as stay, in the old way of speaking
    assert kept.get_seq_length() == 500
    with pytest.raises(ValueError, match="tokens_to_remove: expected -500 to -1, got -501"):
        kept.crop(-501)
    kept.batch_repeat_interleave(2)
    kept.batch_select_indices(torch.tensor([False, True, True, False]))
    torch.testing.assert_close(run(model, kept, input_ids=ids[:, 500:504]).logits, after, rtol=1e-3, atol=1e-3)
    size = kept.nbytes
    kept.reset()
    assert (kept.get_seq_length(), kept.nbytes) == (0, size)
    run(model, kept, input_ids=ids[:1, :5])
    assert kept.batch_size == 1
    with pytest.raises(ValueError, match="expected calls of the whole cache, got one of layer 1"):
        kept.layers[1].crop(-1)
    with pytest.raises(ValueError, match="ModelCache: call"):
        kept.offload(0)


def test_a_cache_of_fixed_size_does_not_grow(model: Any) -> None:
    kept = fq.make_cache(model, "16bit", num_pages=1, max_length=1000)
    with pytest.raises(flashq.CacheFullError, match="max_length: expected at most 64 tokens"):
        run(model, kept)
    assert (kept.get_seq_length(), kept.batch_size) == (0, -1)  # as before, so other rows can come
    few = {name: values[:, -20:] for name, values in prompt(batch=3).items()}
    assert run(model, kept, **few | {"input_ids": few["input_ids"][:1]}).logits.isfinite().all()
    kept.reset()
    with pytest.raises(flashq.CacheFullError, match="a free page, got none"):
        run(model, kept, **few)
    assert kept.batch_size == -1
    assert kept.paged.sequences == []


@pytest.mark.parametrize("cache", ["16bit", "tbq4"])
def test_a_crop_that_one_row_cannot_do_changes_none(cache: str) -> None:
    """Nearly all of the first row is padding, so that it has no window that would be missing."""
    model = make("mistral")
    fq.enable(model, cache)
    kept = fq.make_cache(model, cache, page_size=16)
    inputs = prompt(batch=2, tokens=120)
    inputs["attention_mask"][0, :100] = 0
    run(model, kept, **inputs)
    with pytest.raises(ValueError, match=r"truncate: lengths: expected at least .* released"):
        kept.crop(-60)
    assert [kept.paged.length(row) for row in kept.rows] == [120, 120]
    kept.crop(-3)
    token = {"input_ids": torch.full((2, 1), 5), "attention_mask": inputs["attention_mask"][:, :118]}
    again = run(model, kept, **token).logits
    ids = torch.cat([inputs["input_ids"][:, :117], token["input_ids"]], 1)
    fresh = run(model, fq.make_cache(model, cache, page_size=16), **token | {"input_ids": ids}).logits[:, -1:]
    torch.testing.assert_close(again, fresh, rtol=2e-2, atol=2e-2)


def test_enabled_models_can_be_copied(model: Any) -> None:
    twin = copy.deepcopy(model)
    assert twin.generate.__self__ is twin
    assert twin.generate(**prompt(), max_new_tokens=3, do_sample=False).shape == (1, 73)
