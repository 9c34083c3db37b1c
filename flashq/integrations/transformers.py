"""flashq in Transformers models: attention functions, the caches behind them, and `enable`.

Importing this module registers two attention functions, each with its mask function::

    "fq"    flashq's 16-bit (or fp32) attention, over a `PagedKVModelCache` or over plain keys and values
    "tbq4"  attention straight from the codes of a `TBQ4ModelCache`

and `enable(model)` makes a model and its ``generate`` use one of them. Both do causal attention with sliding windows,
soft caps, attention sinks and left padding; any other mask or option is an error that names it.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers import __version__ as _version
    from transformers.masking_utils import causal_mask_function

    if tuple(map(int, _version.split(".")[:2])) < (5, 17):
        raise ImportError(f"got transformers {_version}")
except ImportError as error:
    raise ImportError(
        "flashq.integrations.transformers: expected transformers 5.17 or newer: pip install 'transformers>=5.17'"
    ) from error

import flashq
from flashq.integrations.model_cache import (
    Mask,
    ModelCache,
    NewTokens,
    PagedKVModelCache,
    TBQ4ModelCache,
    refuse,
)
from flashq.tbq4 import HEAD_DIMS

__all__ = [
    "CACHES",
    "ModelCache",
    "PagedKVModelCache",
    "TBQ4ModelCache",
    "cache_keyword",
    "disable",
    "enable",
    "make_cache",
]

CACHES: dict[str, type[ModelCache]] = {"tbq4": TBQ4ModelCache, "16bit": PagedKVModelCache}
PREFILL_ROWS = 16  # more queries than this over plain keys go to flashq.prefill

# Arguments that models hand through to attention functions and that do not change what attention computes.
_NEUTRAL = {
    "position_ids", "cache_position", "position_embeddings", "use_cache", "return_dict", "logits_to_keep",
    "output_hidden_states", "num_items_in_batch", "token_type_ids", "past_key_values", "cache",
}  # fmt: skip


# --- masks ------------------------------------------------------------------------------------------------------------


def _window_of(mask_function: Any) -> int | None:
    """`window_left` of one of Transformers' causal mask functions; None of any other."""
    if mask_function is causal_mask_function:
        return -1
    name = getattr(mask_function, "__qualname__", "")
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if name == "and_masks.<locals>.and_mask" and len(cells) == 1 and len(cells[0]) == 2:
        windows = [_window_of(part) for part in cells[0]]
        return None if None in windows else min((window for window in windows if window != -1), default=-1)
    if name == "sliding_window_overlay.<locals>.inner_mask" and len(cells) == 1 and isinstance(cells[0], int):
        return cells[0] - 1
    return None


def _left_padding(name: str, attention_mask: Tensor) -> tuple[int, ...] | None:
    """How many of each row's first tokens are padding; None: none anywhere."""
    padded = attention_mask.logical_not()
    counts = padded.sum(1)
    at_the_left = (padded == (torch.arange(padded.shape[1], device=padded.device) < counts[:, None])).all()
    *starts, only_left = torch.cat([counts, at_the_left[None].to(counts.dtype)]).tolist()
    if not only_left:
        refuse(name, "attention_mask", "padding at the left only", "a masked token after a visible one")
    return tuple(starts) if any(starts) else None


def _describe_mask(
    name: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask:
    """The mask function of "fq" and "tbq4": called by the model once for every kind of layer.

    Raises:
        ValueError: a mask that is not causal or has more than a window, padding that is not at the left, or a cache of
            fixed length.
    """
    window_left = _window_of(mask_function)
    if window_left is None:
        what = getattr(mask_function, "__qualname__", repr(mask_function))
        refuse(name, "mask", "causal, with or without a sliding window", what)
    length = int(q_offset) + q_length - int(kv_offset)
    if length != kv_length:
        refuse(name, "cache", "one that grows", f"one of fixed length {kv_length}")
    kv_start = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != int(kv_offset) + length:
            shape = (batch_size, int(kv_offset) + length)
            refuse(name, "attention_mask", f"shape {shape}", f"shape {tuple(attention_mask.shape)}")
        kv_start = _left_padding(name, attention_mask)
    if kv_start is not None:
        kv_start = tuple(max(0, start - int(kv_offset)) for start in kv_start)
    return Mask(q_length, length, window_left, kv_start)


# --- attention --------------------------------------------------------------------------------------------------------


def _attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model's layer calls: query (B, Hq, S, D), key and value (B, Hkv, T, D) -> (B, S, Hq, D), no weights.

    Raises:
        ValueError: a mask that is not from the mask function of the same name, an option that flashq does not have, or
            keys that are not of a cache that the function reads.
    """
    if not isinstance(attention_mask, Mask):
        got = "None" if attention_mask is None else f"a {type(attention_mask).__name__}"
        if isinstance(attention_mask, Tensor):
            got = f"a tensor of shape {tuple(attention_mask.shape)}"
        refuse(name, "attention_mask", "None or a 2-D padding mask, handed to the model", got)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        refuse(name, "is_causal", "True", False)
    if dropout:
        refuse(name, "dropout", "0, because there is no training", dropout)
    if sliding_window is not None and sliding_window - 1 != attention_mask.window_left:
        refuse(name, "sliding_window", f"the mask's, window_left {attention_mask.window_left}", sliding_window)
    for option, given in kwargs.items():
        if option not in _NEUTRAL and given is not None and given is not False:
            refuse(name, option, "None", type(given).__name__ if isinstance(given, Tensor) else given)
    q = query.transpose(1, 2)
    options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "sinks": None if s_aux is None else s_aux.detach().float(),
        "softcap": float(softcap or 0.0),
    }
    if isinstance(key, NewTokens):
        if key.cache.attention != name:
            refuse(name, "cache", f"one that {name!r} reads", type(key.cache).__name__)
        if not isinstance(value, NewTokens) or (value.cache, value.layer) != (key.cache, key.layer):
            refuse(name, "value", "what the cache returned with the key", type(value).__name__)
        k, v = key.new.transpose(1, 2), value.new.transpose(1, 2)
        return key.cache.attend(key.layer, q, k, v, attention_mask, **options), None
    if name == "tbq4":
        refuse(name, "cache", "a TBQ4ModelCache (generate makes one; see make_cache)", "another or none")
    return _attend_plain(q, key.transpose(1, 2), value.transpose(1, 2), attention_mask, **options), None


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
    """q (B, S, Hq, D), k and v (B, T, Hkv, D), all that a layer holds -> like q."""
    if k.shape[1] != mask.kv_length or q.shape[1] != mask.q_length:
        refuse("fq", "attention_mask", f"one of {q.shape[1]} queries and {k.shape[1]} keys", mask)
    if mask.kv_start is None and mask.q_length > PREFILL_ROWS:
        return flashq.prefill(q, k, v, causal=True, window_left=mask.window_left, **options)[0]
    lengths = torch.full((len(q),), mask.kv_length, dtype=torch.int32, device=q.device)
    starts = None
    if mask.kv_start is not None:
        starts = torch.tensor(mask.kv_start, dtype=torch.int32, device=q.device)
    return flashq.decode(q, k, v, lengths, kv_start=starts, window_left=mask.window_left, **options)[0]


for _name in ("fq", "tbq4"):
    AttentionInterface.register(_name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(_name, functools.partial(_describe_mask, _name))


# --- models -----------------------------------------------------------------------------------------------------------


def make_cache(model: PreTrainedModel, cache: str = "tbq4", **options: Any) -> ModelCache:
    """An empty cache for a model, to hand to ``generate`` or to the model itself, for instance over several turns.

    Args:
        model: one that `enable` was called for with the same `cache`.
        cache: "tbq4" or "16bit".
        options: of `ModelCache` and of `flashq.TBQ4Cache` or `flashq.PagedKVCache`, such as max_length, page_size,
            exact_last, page_offsets, slack.
    """
    if cache not in CACHES:
        refuse("make_cache", "cache", " or ".join(map(repr, CACHES)), repr(cache))
    if not isinstance(model, PreTrainedModel):
        refuse("make_cache", "model", "a model of Transformers", type(model).__name__)
    return CACHES[cache](model.config, **options)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which the model takes a cache: "past_key_values", from Transformers 5.24 on "cache"."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _head_dim(config: PreTrainedConfig) -> int:
    text = config.get_text_config(decoder=True)
    if head_dim := getattr(text, "head_dim", None):
        return head_dim
    if not getattr(text, "num_attention_heads", None):
        refuse("enable", "model", "a decoder of attention layers", type(config).__name__)
    return text.hidden_size // text.num_attention_heads


def enable(model: PreTrainedModel, cache: str = "tbq4", **options: Any) -> None:
    """Let a model compute attention with flashq, and its ``generate`` keep keys and values in a flashq cache.

    ``generate`` then makes a new cache for every call without one. A call of the model itself needs one that
    `make_cache` made where attention is to read 4 bits.

    Args:
        model: a decoder of full and sliding-window attention whose attention function can be chosen.
        cache: "tbq4", or "16bit" for the model's own dtype.
        options: as in `make_cache`, for the caches that ``generate`` makes.

    Raises:
        ValueError: something about the model that flashq cannot compute, by name.
    """
    make_cache(model, cache, **options)
    attention, head_dim = CACHES[cache].attention, _head_dim(model.config)
    if cache == "tbq4" and head_dim not in HEAD_DIMS:
        refuse("enable", "head_dim", "64, 128 or 256 for a 4-bit cache", head_dim)
    if head_dim % 8 or head_dim > 256:
        refuse("enable", "head_dim", "a multiple of 8 up to 256", head_dim)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    if model.config.get_text_config(decoder=True)._attn_implementation != attention:
        refuse("enable", "model", "one whose attention function can be chosen", type(model).__name__)
    model.generate = MethodType(_generate_with(cache, options, type(model).generate), model)
    if not hasattr(model, "_attention_before_flashq"):
        model._attention_before_flashq = before


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`."""
    if hasattr(model, "_attention_before_flashq"):
        model.set_attn_implementation(model._attention_before_flashq)
        del model.generate, model._attention_before_flashq


def _uses_cache(kwargs: dict[str, Any], configs: list[GenerationConfig | None]) -> bool | None:
    """The ``use_cache`` that ``generate`` goes by: of its arguments, or of the first config that states one."""
    stated = [config.use_cache for config in configs if config is not None and config.use_cache is not None]
    return kwargs["use_cache"] if "use_cache" in kwargs else (*stated, True)[0]


def _generate_with(cache: str, options: dict[str, Any], generate: Any) -> Any:
    """``generate`` of a model class, with a cache of ours where the caller gives none and has not turned it off."""
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_with_cache(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        config = signature.bind_partial(self, *args, **kwargs).arguments.get("generation_config")
        use_cache = _uses_cache(kwargs, [config, self.generation_config])
        given = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
        if isinstance(given, ModelCache) and not use_cache:  # each step would bring all tokens, behind those it holds
            refuse("generate", "use_cache", f"True with a {type(given).__name__}", use_cache)
        if given is None and use_cache:
            kwargs[cache_keyword(self)] = make_cache(self, cache, **options)
        return generate(self, *args, **kwargs)

    return generate_with_cache
