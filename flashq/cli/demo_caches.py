"""The caches of the demo: paged, filled by the append ops, read by the attention ops."""

from __future__ import annotations

import torch
from torch import Tensor

import flashq
from flashq.tbq4 import OFFSET_WINDOW, block_width, page_offsets

PAGE_SIZE = 64
EXACT_PAGE_SIZE = 16
EXACT_FIRST, EXACT_LAST = 4, 64
# The last 64 tokens lie on five pages of 16 at most; these are reused in turns, and page 0 keeps the first tokens.
EXACT_RING = EXACT_LAST // EXACT_PAGE_SIZE + 1


def _shuffled_pages(count: int, device: str) -> Tensor:
    """A block table (1, count), int32: where pages lie is the allocator's business, so here they lie anywhere."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order.to(device=device, dtype=torch.int32)[None]


def _slots(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """The slots of tokens at `positions` (T) of the sequence that `table` (1, pages) belongs to."""
    return table[0, positions // page_size].long() * page_size + positions % page_size


class Cache16:
    """Keys and values as they are, in pages of 64 tokens."""

    def __init__(self, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        pages = -(-capacity // PAGE_SIZE)
        self.k, self.v = torch.zeros(2, pages, PAGE_SIZE, kv_heads, head_dim, dtype=dtype, device=device)
        self.table = _shuffled_pages(pages, device)
        self.seqlens = torch.zeros(1, dtype=torch.int32, device=device)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v (T, Hkv, D) become the next T tokens."""
        positions = torch.arange(self.length, self.length + len(k), device=k.device)
        flashq.kv_append_(k, v, self.k, self.v, _slots(self.table, positions, PAGE_SIZE))
        self.length += len(k)
        self.seqlens.fill_(self.length)

    def attend(self, q: Tensor) -> Tensor:
        """q (S, Hq, D), the queries of the last S tokens -> out (S, Hq, D)."""
        return flashq.decode(q[None], self.k, self.v, self.seqlens, self.table)[0][0]

    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Tbq4Cache:
    """Keys and values in TBQ4; with `offsets` one key offset a page, with `exact` 4 first and 64 recent raw tokens."""

    def __init__(
        self,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        *,
        offsets: bool,
        exact: bool,
    ) -> None:
        pages = -(-capacity // PAGE_SIZE)
        planes = (pages, kv_heads, PAGE_SIZE)
        self.k_codes, self.v_codes = torch.zeros(2, *planes, head_dim // 2, dtype=torch.uint8, device=device)
        blocks = head_dim // block_width(head_dim)
        self.k_norms, self.v_norms = torch.zeros(2, *planes, blocks, dtype=torch.float16, device=device)
        self.table = _shuffled_pages(pages, device)
        self.seqlens = torch.zeros(1, dtype=torch.int32, device=device)
        self.length = 0
        self.k_offsets = None
        self.recent = torch.zeros(0, kv_heads, head_dim, dtype=dtype, device=device)
        if offsets:
            self.k_offsets = torch.zeros(pages, kv_heads, head_dim, dtype=torch.float16, device=device)
        self.exact_k = self.exact_v = self.exact_table = None
        if exact:
            pool = (1 + EXACT_RING, EXACT_PAGE_SIZE, kv_heads, head_dim)
            self.exact_k, self.exact_v = torch.zeros(2, *pool, dtype=dtype, device=device)
            ring = torch.arange(-(-capacity // EXACT_PAGE_SIZE), dtype=torch.int32, device=device)
            ring[1:] = 1 + ring[1:] % EXACT_RING
            self.exact_table = ring[None]

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v (T, Hkv, D) become the next T tokens."""
        positions = torch.arange(self.length, self.length + len(k), device=k.device)
        if self.k_offsets is not None:
            first, offsets = page_offsets(k, self.length, PAGE_SIZE, self.recent)
            self.k_offsets[self.table[0, first : first + len(offsets)].long()] = offsets
            self.recent = torch.cat([self.recent, k])[-OFFSET_WINDOW:]
        planes = (self.k_codes, self.k_norms, self.v_codes, self.v_norms)
        flashq.tbq4_append_(k, v, *planes, _slots(self.table, positions, PAGE_SIZE), self.k_offsets)
        self.length += len(k)
        self.seqlens.fill_(self.length)
        if self.exact_k is not None:
            # Of a long append only what the pool still holds afterwards is written: a negative slot is skipped.
            slots = _slots(self.exact_table, positions, EXACT_PAGE_SIZE)
            kept = positions // EXACT_PAGE_SIZE > (self.length - 1) // EXACT_PAGE_SIZE - EXACT_RING
            slots[~kept & (positions >= EXACT_PAGE_SIZE)] = -1
            flashq.kv_append_(k, v, self.exact_k, self.exact_v, slots)

    def attend(self, q: Tensor) -> Tensor:
        """q (S, Hq, D), the queries of the last S tokens -> out (S, Hq, D)."""
        exact = self.exact_k is not None
        return flashq.tbq4_attention(
            q[None],
            self.k_codes,
            self.k_norms,
            self.v_codes,
            self.v_norms,
            self.seqlens,
            self.table,
            k_offsets=self.k_offsets,
            exact_k=self.exact_k,
            exact_v=self.exact_v,
            exact_block_table=self.exact_table,
            exact_first=EXACT_FIRST if exact else 0,
            exact_last=EXACT_LAST if exact else 0,
        )[0][0]

    def bytes(self) -> int:
        parts = (self.k_codes, self.k_norms, self.v_codes, self.v_norms, self.k_offsets, self.exact_k, self.exact_v)
        return sum(part.nbytes for part in parts if part is not None)
