"""The two kinds of cache: 16-bit values as they are, and TBQ4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashq.caches.arguments import as_integer
from flashq.caches.base import PagedCache
from flashq.caches.index import Chunk, Prompt
from flashq.tbq4 import FINGERPRINT, HEAD_DIMS, block_width

EXACT_PAGE_SIZE = 16


class PagedKVCache(PagedCache):
    """Keys and values in 16 (or 32) bits; read by `flashq.decode`, prompts by `flashq.prefill_varlen` before that.

    Args:
        num_layers, kv_heads, head_dim: of the model; head_dim a multiple of 8 up to 256.
        num_pages: pages of every layer with full attention, at most as many of a layer with a window.
        page_size: tokens a page.
        max_sequences: sequences at a time.
        max_length: tokens a sequence at most; None: all pages.
        window_left: -1 (full attention), or how many tokens before itself a query sees; one for all layers, or one
            each. Layers of one window share a table of pages, and pages that left the window are released.
        window_pages: pages of a layer with a window; None: enough for all sequences.
        slack: tokens that `truncate` can always take back.
        max_chunk: longer appends are written and attended in chunks of so many tokens.
        dtype, device: of keys and values.
    """

    _attends_prompts = True

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__(num_layers, kv_heads, head_dim, **options)
        if head_dim % 8 or not 8 <= head_dim <= 256:
            self._refuse("", "head_dim", "a multiple of 8 from 8 to 256", head_dim)
        planes = []
        for kind, table in enumerate(self._tables):
            layers = self.window_left.count(self._kinds[kind])
            shape = (layers, table.pool.size, self.page_size, kv_heads, head_dim)
            planes.append({x: self._zeros(*shape, dtype=self.dtype) for x in ("k", "v")})
        self._use(planes, self._new_index(self.max_sequences, self.max_length))

    def _write(self, layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        p = self._layer_planes[layer]
        torch.ops.flashq.kv_append_(k, v, p["k"], p["v"], chunk.slots[self._layers[layer][0]])

    def _attend(
        self, layer: int, chunk: Chunk, q: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        p = self._layer_planes[layer]
        return torch.ops.flashq.decode(
            q, p["k"], p["v"], chunk.seqlens, chunk.block_tables[self._layers[layer][0]],
            chunk.cu_seqlens if q.dim() == 3 else None, chunk.kv_start, sinks,
            max_seqlen_q=chunk.longest, window_left=self.window_left[layer], **options,
        )  # fmt: skip

    def _attend_prompt(
        self, layer: int, prompt: Prompt, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        ends, longest = prompt.cu_seqlens, prompt.longest
        out, lse = torch.ops.flashq.prefill_varlen(
            q, k, v, ends, ends, sinks, max_seqlen_q=longest, max_seqlen_k=longest,
            window_left=self.window_left[layer], **options,
        )  # fmt: skip
        if prompt.padding is not None:  # its queries see nothing but the sink
            out.masked_fill_(prompt.padding[:, None, None], 0)
            if sinks is None:
                lse.masked_fill_(prompt.padding, float("-inf"))
            else:
                lse = torch.where(prompt.padding, sinks[:, None], lse)
        return out, lse


class TBQ4Cache(PagedCache):
    """Keys and values in 4 bits (`flashq.tbq4`); read by `flashq.tbq4_attention` straight from the codes.

    By default keys are stored less a per-page offset (`flashq.tbq4_page_offsets_`), and the first 4 and last 64 tokens
    of a sequence are kept exactly as well, in a small pool: real models need both.

    Args:
        num_layers, kv_heads, head_dim: of the model; head_dim 64, 128 or 256.
        page_offsets: False: no offsets.
        exact_first, exact_last: tokens that are read exactly; 0: none. What the pool does not hold any more, because
            more than `slack` tokens were taken back, is read from the codes.
        exact_pages: pages of 16 tokens in the pool; None: enough for all sequences.
        options: as in `PagedKVCache`; dtype is that of q, k, v and the exact pool.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_offsets: bool = True,
        exact_first: int = 4,
        exact_last: int = 64,
        exact_pages: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_layers, kv_heads, head_dim, **options)
        if head_dim not in HEAD_DIMS:
            self._refuse("", "head_dim", "64, 128 or 256", head_dim)
        self.page_offsets = bool(page_offsets)
        self.exact_first = exact_first = as_integer("TBQ4Cache", "exact_first", exact_first)
        self.exact_last = exact_last = as_integer("TBQ4Cache", "exact_last", exact_last)
        if exact_pages is not None:
            exact_pages = as_integer("TBQ4Cache", "exact_pages", exact_pages)
        planes = []
        for kind, table in enumerate(self._tables):
            pages = (self.window_left.count(self._kinds[kind]), table.pool.size, kv_heads)
            codes = {}
            for name in ("k", "v"):
                codes[f"{name}_codes"] = self._zeros(*pages, self.page_size, head_dim // 2, dtype=torch.uint8)
                norms = (self.page_size, head_dim // block_width(head_dim))
                codes[f"{name}_norms"] = self._zeros(*pages, *norms, dtype=torch.float16)
            if page_offsets:
                codes["k_offsets"] = self._zeros(*pages, head_dim, dtype=torch.float16)
            planes.append(codes)
        if exact_first or exact_last:
            self._exact_table = len(self._tables)
            table = self._add_table("exact pages", EXACT_PAGE_SIZE, exact_pages, exact_last - 1, exact_first)
            shape = (num_layers, table.pool.size, EXACT_PAGE_SIZE, kv_heads, head_dim)
            planes.append({x: self._zeros(*shape, dtype=self.dtype) for x in ("exact_k", "exact_v")})
        self._use(planes, self._new_index(self.max_sequences, self.max_length))

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {
            "fingerprint": FINGERPRINT, "block": block_width(self.head_dim), "page_offsets": self.page_offsets,
            "exact_first": self.exact_first, "exact_last": self.exact_last, "exact_page_size": EXACT_PAGE_SIZE,
        }  # fmt: skip

    def _write(self, layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        kind, p = self._layers[layer][0], self._layer_planes[layer]
        exact, ops = self._exact_table, torch.ops.flashq
        exact_table = None if exact is None else chunk.block_tables[exact]
        if self.page_offsets:
            ops.tbq4_page_offsets_(
                k, p["k_codes"], p["k_norms"], p["k_offsets"], chunk.seqlens, chunk.block_tables[kind],
                chunk.cu_seqlens, chunk.kv_start, p.get("exact_k"), exact_table,
            )  # fmt: skip
        planes = (p["k_codes"], p["k_norms"], p["v_codes"], p["v_norms"])
        ops.tbq4_append_(k, v, *planes, chunk.slots[kind], p.get("k_offsets"))
        if exact is not None:
            ops.kv_append_(k, v, p["exact_k"], p["exact_v"], chunk.slots[exact])

    def _attend(
        self, layer: int, chunk: Chunk, q: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        kind, p = self._layers[layer][0], self._layer_planes[layer]
        exact = self._exact_table
        return torch.ops.flashq.tbq4_attention(
            q, p["k_codes"], p["k_norms"], p["v_codes"], p["v_norms"], chunk.seqlens, chunk.block_tables[kind],
            chunk.cu_seqlens if q.dim() == 3 else None, chunk.kv_start, sinks, p.get("k_offsets"),
            p.get("exact_k"), p.get("exact_v"), None if exact is None else chunk.block_tables[exact],
            exact_first=self.exact_first, exact_last=self.exact_last, max_seqlen_q=chunk.longest,
            window_left=self.window_left[layer], **options,
        )  # fmt: skip
