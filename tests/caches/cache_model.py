"""What a cache has to compute, from plain tensors of every sequence and none of the cache's bookkeeping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashq
from flashq import reference
from flashq.caches import PagedCache

EXACT_PAGE = 16


@dataclass
class State:
    """A sequence: raw keys, values and offsets (layers, room, Hkv, D) of which `length` tokens are there, and the pages
    that are still held: `held["exact"]`, and by window `held[window]`."""

    tensors: list[Tensor]
    kv_start: int
    length: int = 0
    held: dict[str | int, set[int]] = field(default_factory=dict)


class Model:
    """A cache's sequences. `extend` returns what attention has to give, (T, Hq, D) a layer."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.states = cache, dict[int, State]()
        self.is_tbq4 = isinstance(cache, flashq.TBQ4Cache)
        self.pools: dict[str | int, tuple[int, int, int]] = {}  # page size, tokens kept before the end, first tokens
        for window in set(cache.window_left) - {-1}:
            self.pools[window] = cache.page_size, window, 0
        if self.is_tbq4 and (cache.exact_first or cache.exact_last):
            self.pools["exact"] = EXACT_PAGE, cache.exact_last - 1, cache.exact_first

    def alloc(self, sequence: int, kv_start: int = 0) -> None:
        shape = (self.cache.num_layers, self.cache.max_length, self.cache.kv_heads, self.cache.head_dim)
        held: dict[str | int, set[int]] = {name: set() for name in self.pools}
        self.states[sequence] = State([torch.zeros(shape) for _ in range(3)], kv_start, held=held)

    def fork(self, source: int, target: int) -> None:
        old = self.states[source]
        self._trim(old)
        held = {name: set(pages) for name, pages in old.held.items()}
        self.states[target] = State([x.clone() for x in old.tensors], old.kv_start, old.length, held)

    def truncate(self, sequence: int, length: int) -> None:
        state = self.states[sequence]
        self._trim(state)
        state.length = length
        for name, (page_size, _, _) in self.pools.items():
            state.held[name] = {i for i in state.held[name] if i * page_size < length}

    def can_truncate(self, sequence: int, length: int) -> bool:
        """Whether every window at the new end is still held, and the page that goes on there."""
        state, page_size = self.states[sequence], self.cache.page_size
        self._trim(state)
        for window in set(self.pools) - {"exact"}:
            needed = {t // page_size for t in range(max(state.kv_start, length - window), length)}
            page = max(state.kv_start, length) // page_size  # of the next token that is stored
            if page < -(-length // page_size):
                needed.add(page)
            if not needed <= state.held[window]:
                return False
        return True

    def _trim(self, state: State) -> None:
        for name, (page_size, recent, first) in self.pools.items():
            keep = state.length - recent - self.cache.slack  # from here on
            pinned = range(state.kv_start, state.kv_start + first)
            pages = {i for i in state.held[name] if (i + 1) * page_size > keep}
            state.held[name] = pages | (state.held[name] & {t // page_size for t in pinned})

    def extend(
        self, sequences: list[int], counts: list[int], q: Tensor, k: Tensor, v: Tensor, *, attend: bool = True
    ) -> Tensor:
        """q (layers, T, Hq, D), k and v (layers, T, Hkv, D) -> out (layers, T, Hq, D)."""
        out = torch.zeros(q.shape)
        begin, room = 0, self.cache.max_chunk
        for sequence, count in zip(sequences, counts, strict=True):
            while count:
                take = min(count, room)
                rows = slice(begin, begin + take)
                self._append(self.states[sequence], k[:, rows].float(), v[:, rows].float())
                if attend:
                    out[:, rows] = self.attend(sequence, q[:, rows])
                begin, room, count = begin + take, room - take, count - take
                room = room or self.cache.max_chunk
        return out

    def _append(self, state: State, k: Tensor, v: Tensor) -> None:
        self._trim(state)
        start, end = state.length, state.length + k.shape[1]
        for layer in range(len(k)):
            state.tensors[0][layer, start:end], state.tensors[1][layer, start:end] = k[layer], v[layer]
            if self.is_tbq4 and self.cache.page_offsets:
                self._fix_offsets(state, layer, start, end)
        for name, (page_size, recent, first) in self.pools.items():
            fresh = set(range(max(-(-start // page_size), state.kv_start // page_size), -(-end // page_size)))
            if recent < 0:
                fresh &= {t // page_size for t in range(state.kv_start, state.kv_start + first)}
            state.held[name] |= fresh
        state.length = end

    def _fix_offsets(self, state: State, layer: int, start: int, end: int) -> None:
        page_size, window = self.cache.page_size, self.cache.window_left[layer]
        for page in range(-(-end // page_size)):
            first, last = max(page * page_size, state.kv_start), (page + 1) * page_size
            if not start <= first < min(end, last):
                continue
            before = [
                self._earlier(state, layer, t, start, window) for t in range(max(state.kv_start, first - 64), first)
            ]
            keys = [key for key in before if key is not None]
            if end >= last or not keys:
                keys = list(state.tensors[0][layer, first : min(last, end)])
            total = torch.zeros_like(keys[0])
            for key in keys:
                total = total + key
            state.tensors[2][layer, first:last] = (total / len(keys)).half().float()

    def _earlier(self, state: State, layer: int, token: int, start: int, window: int) -> Tensor | None:
        """A key before a page, raw where it is new or held, else decoded, None where it is gone."""
        if token >= start or token // EXACT_PAGE in state.held.get("exact", ()):
            return state.tensors[0][layer, token]
        if window != -1 and token // self.cache.page_size not in state.held[window]:
            return None
        key, offset = state.tensors[0][layer, token], state.tensors[2][layer, token]
        return reference.tbq4_dequantize(*reference.tbq4_quantize(key - offset)) + offset

    def attend(self, sequence: int, q: Tensor, layers: range | None = None) -> Tensor:
        """The last queries of a sequence, q (layers, S, Hq, D)."""
        state = self.states[sequence]
        out = torch.zeros(q.shape)
        key = torch.arange(state.length)
        position = torch.arange(state.length - q.shape[1], state.length)[:, None]
        exact = torch.zeros(q.shape[1], state.length, dtype=torch.bool)
        if "exact" in self.pools:
            near = key > position - self.cache.exact_last if self.cache.exact_last else exact
            held = torch.tensor([t // EXACT_PAGE in state.held["exact"] for t in range(state.length)]).bool()
            exact = held & (near | (key < state.kv_start + self.cache.exact_first))
        for layer in layers or range(len(q)):
            raw_k, raw_v, offsets = (x[layer, : state.length] for x in state.tensors)
            window = self.cache.window_left[layer]
            visible = (key >= state.kv_start) & (key <= position)
            if window != -1:
                visible &= key >= position - window
            read_k, read_v = raw_k, raw_v
            if self.is_tbq4:
                read_k = reference.tbq4_dequantize(*reference.tbq4_quantize(raw_k - offsets)) + offsets
                read_v = reference.tbq4_dequantize(*reference.tbq4_quantize(raw_v))
            out[layer] = _attend(q[layer].float(), raw_k, raw_v, read_k, read_v, visible, exact)
        return out


def _attend(
    q: Tensor, raw_k: Tensor, raw_v: Tensor, read_k: Tensor, read_v: Tensor, visible: Tensor, exact: Tensor
) -> Tensor:
    """q (S, Hq, D), keys and values (L, Hkv, D), masks (S, L): raw where exact, else as they are read."""
    group = q.shape[1] // raw_k.shape[1]
    raw_k, raw_v, read_k, read_v = (
        x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (raw_k, raw_v, read_k, read_v)
    )
    rows = q.double().transpose(0, 1) / math.sqrt(q.shape[-1])
    scores = torch.where(exact, rows @ raw_k.mT, rows @ read_k.mT).masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num()  # a row that sees nothing: 0
    out = weights.masked_fill(~exact, 0) @ raw_v + weights.masked_fill(exact, 0) @ read_v
    return out.transpose(0, 1).float()


def check_pages(cache: PagedCache) -> None:
    """Every page is free once, or used by as many tables as its count says; rows of ended sequences are empty."""
    rows = {state.row for state in cache._sequences.values()}
    assert sorted(rows | set(cache._free_rows)) == list(range(cache.max_sequences))
    assert len(rows) + len(cache._free_rows) == cache.max_sequences
    for table in cache._tables:
        users = [0] * len(table.pool.users)
        for row in range(cache.max_sequences):
            for page in table.pages[row].tolist():
                if page >= 0:
                    assert row in rows
                    users[page] += 1
        assert users == table.pool.users
        assert sorted(table.pool.free) == [page for page, count in enumerate(users) if count == 0]


def snapshot(cache: PagedCache) -> list:
    """All that a failed call must leave as it was, free lists in their order."""
    sequences = [(handle, s.row, s.length, s.kv_start) for handle, s in cache._sequences.items()]
    tables = [(t.pages.tolist(), list(t.trimmed), list(t.pool.users), list(t.pool.free)) for t in cache._tables]
    return [sequences, tables, list(cache._free_rows), cache._next_handle]


def random_inputs(cache: PagedCache, tokens: int, seed: int, q_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (layers, tokens, heads, D) in the cache's dtype; keys with a bias, as real ones."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(cache.num_layers, tokens, heads, cache.head_dim) for heads in (q_heads, cache.kv_heads, cache.kv_heads)]
    q, k, v = (torch.randn(shape, generator=g) for shape in shapes)
    return q.to(cache.dtype), (k + 2).to(cache.dtype), v.to(cache.dtype)


class Pair:
    """A cache, on any device, and its model, driven together; `extend` compares them."""

    def __init__(self, cache: PagedCache, tolerance: float) -> None:
        self.cache, self.model, self.tolerance = cache, Model(cache), tolerance
        self.seed = 0

    def alloc(self, kv_start: int = 0) -> int:
        sequence = self.cache.alloc(kv_start)
        self.model.alloc(sequence, kv_start)
        return sequence

    def fork(self, sequence: int) -> int:
        copy = self.cache.fork(sequence)
        self.model.fork(sequence, copy)
        return copy

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        self.model.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        self.cache.free(sequence)
        del self.model.states[sequence]

    def extend(self, sequences: list[int], counts: list[int], *, compare: bool = True) -> None:
        step = self.cache.extend(sequences, counts)
        self.seed += 1
        inputs = random_inputs(self.cache, step.tokens, self.seed)
        q, k, v = (x.to(self.cache.device) for x in inputs)
        got = torch.stack(
            [step.attend(layer, q[layer], k[layer], v[layer])[0] for layer in range(self.cache.num_layers)]
        )
        expected = self.model.extend(sequences, counts, *inputs, attend=compare)
        for sequence in sequences:
            assert self.cache.length(sequence) == self.model.states[sequence].length
        if compare:
            self._compare(got, expected)

    def lookup(self, sequences: list[int]) -> None:
        """The last query again."""
        self.seed += 1
        q = random_inputs(self.cache, len(sequences), self.seed)[0]
        step = self.cache.lookup(sequences)
        got = torch.stack([step.attend(i, q[i].to(self.cache.device))[0] for i in range(self.cache.num_layers)])
        self._compare(got, torch.cat([self.model.attend(s, q[:, i, None]) for i, s in enumerate(sequences)], dim=1))

    def _compare(self, got: Tensor, expected: Tensor) -> None:
        for ours, truth in zip(got.cpu().float(), expected, strict=True):
            assert (ours - truth).norm() <= self.tolerance * truth.norm() + 1e-6
