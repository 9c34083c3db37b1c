"""Small decoders with random weights, one of every kind that the integration supports, and how to run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 24}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # classes of the config and of the model, and more sizes
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", WINDOW),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", WINDOW | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", WINDOW | {
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"head_dim": 96, "hidden_size": 384}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", WINDOW | {
        "num_local_experts": 4, "num_experts_per_tok": 4,  # all of them, so that no rounding changes which
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
}  # fmt: skip


def make(name: str, **sizes: Any) -> Any:
    """A model in fp32 with eager attention; the same weights every time."""
    config, model, more = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | more | sizes)).eval()
    if name == "gpt_oss":  # made of zeros, and a sink has to be seen
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, 1.0)
        made.set_experts_implementation("eager")  # the default's kernel of torch takes no fp32 on CUDA
    made.set_attn_implementation("eager")
    return made


def prompt(batch: int = 1, tokens: int = 70, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Random tokens; of several rows the first has 11 tokens of padding at its left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, SIZES["vocab_size"], (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, :11], mask[0, :11] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
