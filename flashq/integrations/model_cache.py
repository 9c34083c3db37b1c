"""The caches of Transformers models that hold their keys and values in a `flashq.TBQ4Cache` or a `PagedKVCache`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from flashq.caches import CacheFullError, PagedCache, PagedKVCache, Step, TBQ4Cache
from flashq.caches.arguments import as_integer
from flashq.caches.pages import count_pages

ROOM = 256  # tokens a row beyond those that are needed, when a cache is made or gets larger


def refuse(where: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError in the words of every flashq error."""
    raise ValueError(f"flashq.integrations.transformers.{where}: {argument}: expected {expected}, got {got}")


@dataclass(frozen=True)
class Mask:
    """What a model's attention mask says: causal, with a window, over rows that may begin with padding.

    It stands where other attention functions get a mask tensor, and whatever takes it for one raises.
    """

    q_length: int
    kv_length: int
    """Tokens up to the last query that the layer holds."""
    window_left: int
    """Tokens before itself that a query sees; -1: all."""
    kv_start: tuple[int, ...] | None
    """How many of the first keys are padding, by row; None: no padding."""


def layer_windows(config: PreTrainedConfig, where: str) -> list[int]:
    """`window_left` of every layer of a decoder, -1 for full attention.

    Raises:
        ValueError: the model has layers of another kind.
    """
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        refuse(where, "model", "a decoder", "an encoder and a decoder")
    if getattr(text, "num_kv_shared_layers", None):
        refuse(where, "num_kv_shared_layers", "layers with keys of their own", text.num_kv_shared_layers)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            refuse(where, "attention_chunk_size", "full or sliding attention", text.attention_chunk_size)
        kinds = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            refuse(where, "layer_types", "full_attention or sliding_attention", kind)
        if kind == "sliding_attention" and not window:
            refuse(where, "sliding_window", "a number of tokens", window)
    return [-1 if kind == "full_attention" else window - 1 for kind in kinds]


def _options_of(kind: type[PagedCache]) -> set[str]:
    """Options of a kind of cache that neither the model nor `ModelCache` decides."""
    signatures = [inspect.signature(base.__init__) for base in kind.__mro__ if issubclass(base, PagedCache)]
    names = {p.name for signature in signatures for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    return names - {"window_left", "device", "dtype", "max_length"}


class NewTokens(Tensor):
    """Keys or values of one layer on their way from `update` to the attention function, which stores and attends them.

    Looks like all keys of the layer, (B, Hkv, tokens, D), but holds the new ones only; whatever computes with it
    raises.
    """

    cache: ModelCache
    layer: int
    new: Tensor

    @staticmethod
    def __new__(cls, cache: ModelCache, layer: int, new: Tensor, tokens: int) -> NewTokens:
        shape = (*new.shape[:2], tokens, new.shape[3])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        self.cache, self.layer, self.new = cache, layer, new
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NewTokens(layer={self.layer}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotImplementedError(
            f"flashq.integrations.transformers: {func}: keys and values of this cache are read by the attention "
            'functions "fq" and "tbq4" only: call flashq.integrations.transformers.enable(model); a model whose layers '
            "compute with what the cache returned is not supported"
        )


class _Layer(CacheLayerMixin):
    """One layer of a `ModelCache`, for what asks layer by layer; its content is the cache's business."""

    is_croppable = True
    is_initialized = True
    supports_early_init = False

    def __init__(self, cache: ModelCache, index: int, is_sliding: bool) -> None:
        self._cache, self._index, self.is_sliding = cache, index, is_sliding

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("ModelCache", "layers", "calls of the whole cache", f"one of layer {self._index}")

    offload = prefetch = reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class ModelCache(Cache):
    """Keys and values of a Transformers model in a flashq cache, which is made at the first forward pass and grows.

    Hand it to ``generate`` or to the model (as ``past_key_values``, from 5.24 on ``cache``) after `enable`. Tokens are
    stored by the attention function, so the model has to use that of the cache's name.

    Args:
        config: the model's.
        max_length: tokens a row to make room for at once.
        dtype: of keys and values, and of attention; None: the model's.
        options: of the flashq cache: page_size, slack, max_chunk and so on. With num_pages it does not grow.

    Raises:
        ValueError: the model has layers that are neither full nor sliding-window attention; an option that the flashq
            cache does not have, or that the model decides.
    """

    attention: str
    kind: type[PagedCache]

    def __init__(
        self, config: PreTrainedConfig, *, max_length: int = 0, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        self.windows = layer_windows(config, type(self).__name__)
        for name in sorted(options.keys() - (known := _options_of(self.kind))):
            self._refuse("options", ", ".join(sorted(known)), name)
        where = f"integrations.transformers.{type(self).__name__}"
        self._max_length = as_integer(where, "max_length", max_length)
        self._page_size = as_integer(where, "page_size", options.get("page_size", 64), 1)
        super().__init__(layers=[_Layer(self, i, window != -1) for i, window in enumerate(self.windows)])
        self.paged: PagedCache | None = None
        """The flashq cache; None before the first forward pass."""
        self.rows: list[int] = []
        """Its sequence of every row of the batch."""
        self._options = {"max_chunk": 256, **options}
        self._dtype = dtype
        self._kv_start: list[int] = []
        self._step: Step | None = None
        self._missing: set[int] = set()  # layers that have not stored the step's tokens yet

    # --- what the attention function does ---

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, sinks: Tensor | None,
        softcap: float,
    ) -> Tensor:  # fmt: skip
        """Store k, v (B, S, Hkv, D) as the next tokens of one layer and attend them with q (B, S, Hq, D) -> like q.

        Raises:
            ValueError: a mask that does not fit what the cache holds, or a batch of another size.
            CacheFullError: the cache was made with num_pages, and they are in use.
        """
        if mask.window_left != self.windows[layer]:
            self._refuse("sliding_window", f"window_left {self.windows[layer]} in layer {layer}", mask.window_left)
        if layer not in self._missing:
            self._step = self._begin(k, mask)
            self._missing = set(range(len(self.windows)))
        q, k, v, model_dtype = *(x.to(self.paged.dtype) for x in (q, k, v)), q.dtype
        # Of a model in fp32, 4-bit attention is not rounded to the dtype of the exact tokens on its way back.
        wide = self.kind is TBQ4Cache and model_dtype == torch.float32
        out, _ = self._step.attend(
            layer, q, k, v, scale=scale, sinks=sinks, softcap=softcap, out_dtype=model_dtype if wide else None
        )
        self._missing.remove(layer)
        return out.to(model_dtype)

    def _begin(self, k: Tensor, mask: Mask) -> Step:
        """Room for the tokens of a forward pass, in every row."""
        batch, count, kv_heads, head_dim = k.shape
        self._check_complete()
        length = self.get_seq_length()
        if self.rows and batch != len(self.rows):
            self._refuse("batch size", str(len(self.rows)), batch)
        if (mask.q_length, mask.kv_length) != (count, length + count):
            self._refuse("attention_mask", f"one of {length + count} tokens", f"one of {mask.kv_length}")
        starts = list(mask.kv_start or [0] * batch)
        for old, start in zip(self._kv_start, starts, strict=False):
            if start != old and length > min(start, old):
                self._refuse("attention_mask", f"padding as before, {old} tokens in a row", start)
        if self.paged is None:
            tokens = max(self._max_length, count + ROOM)
            pages = batch * count_pages(tokens, self._page_size)
            self.paged = self.kind(
                len(self.windows), kv_heads, head_dim,
                **{"num_pages": pages, "max_sequences": batch, "window_left": self.windows, "device": k.device,
                   "dtype": self._dtype or k.dtype, **self._options},
            )  # fmt: skip
        is_new = not self.rows
        try:
            if is_new:
                self._reserve(max_sequences=batch)
                self.rows.extend(map(self.paged.alloc, starts))
            for row, old, start in zip(self.rows, self._kv_start, starts, strict=False):
                if start != old:
                    self.paged.pad(row, start)
            self._kv_start = starts
            return self._extend(count)
        except BaseException:
            if is_new:  # no tokens came, so the next call may have other rows
                self.reset()
            raise

    def _extend(self, count: int) -> Step:
        """Room for `count` more tokens in every row, in a larger cache where this one is full."""
        try:
            return self.paged.extend(self.rows, count)
        except CacheFullError:
            if "num_pages" in self._options:
                raise
        length = self.get_seq_length()
        tokens = max(length + count + ROOM, length * 3 // 2)
        self._reserve(num_pages=len(self.rows) * count_pages(tokens, self.paged.page_size), max_length=tokens)
        return self.paged.extend(self.rows, count)

    def _reserve(self, **sizes: int) -> None:
        if self.paged is not None and any(size > getattr(self.paged, name) for name, size in sizes.items()):
            self.paged.reserve(**sizes)

    def _check_complete(self) -> None:
        """A forward pass that stopped half-way has left some layers without their tokens."""
        if self._missing:
            self._refuse(
                "layers", "tokens in every layer before the next call (or a reset)",
                f"none in {len(self._missing)} of {len(self.windows)} layers",
            )  # fmt: skip

    def _refuse(self, argument: str, expected: str, got: object) -> NoReturn:
        refuse(type(self).__name__, argument, expected, got)

    # --- what Transformers does ---

    @property
    def nbytes(self) -> int:
        """Bytes of the flashq cache's tensors; 0 before the first forward pass."""
        return 0 if self.paged is None else self.paged.nbytes

    @property
    def batch_size(self) -> int:
        return len(self.rows) if self.rows else -1

    @property
    def is_initialized(self) -> bool:
        return self.paged is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, S, D) of a layer, packed up for the attention function."""
        if layer_idx >= len(self.windows):
            self._refuse("layers", f"a model of {len(self.windows)}, for which it was made", f"layer {layer_idx}")
        tokens = key_states.shape[2] + self.get_seq_length()
        if layer_idx in self._missing:  # this pass has begun, in another layer
            tokens = self.get_seq_length()
        return tuple(NewTokens(self, layer_idx, new, tokens) for new in (key_states, value_states))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row, padding included; all rows have as many."""
        return self.paged.length(self.rows[0]) if self.rows else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        for row in self.rows:
            self.paged.free(row)
        self.rows, self._kv_start, self._step, self._missing = [], [], None, set()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last tokens (a negative number), or keep the first ones (a positive number).

        Raises:
            ValueError: pages of a sliding window that would be needed are gone: make the cache with a larger slack.
        """
        self._check_complete()
        length, tokens_to_remove = self.get_seq_length(), int(tokens_to_remove)
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        if not 0 <= keep <= length:
            self._refuse("tokens_to_remove", f"-{length} to -1", tokens_to_remove)
        if keep < length:
            self.paged.truncate(self.rows, keep)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] is; rows share the pages that they have in common."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices` (or where a bool tensor is True)."""
        self._select(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after another."""
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        self._check_complete()
        if self.rows:
            self._reserve(max_sequences=len(indices))
            self.rows = self.paged.select(self.rows, indices)
            self._kv_start = [self._kv_start[i] for i in indices]

    def _not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("call", "one that a cache of attention layers on one device answers", "another")

    offload = prefetch = update_conv_state = update_recurrent_state = update_indexer = _not_supported


class PagedKVModelCache(ModelCache):
    """A `ModelCache` of 16-bit (or fp32) values in a `flashq.PagedKVCache`, for the attention function "fq"."""

    attention = "fq"
    kind = PagedKVCache


class TBQ4ModelCache(ModelCache):
    """A `ModelCache` of 4-bit values in a `flashq.TBQ4Cache`, for the attention function "tbq4".

    Options include page_offsets, exact_first and exact_last, which by default are those that real models need.
    """

    attention = "tbq4"
    kind = TBQ4Cache
