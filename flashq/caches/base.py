"""The bookkeeping that 16-bit and 4-bit caches share."""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flashq.caches import files, grow
from flashq.caches.arguments import MOST_TOKENS, as_integer, as_integers, refuse
from flashq.caches.index import (
    STABLE_TOKENS,
    Chunk,
    Index,
    Prompt,
    plan_chunk,
    plan_prompt,
    shared_index,
    split_counts,
    to_device,
    upload,
)
from flashq.caches.pages import CacheFullError, Journal, PageTable, Sequence, all_or_nothing, count_pages
from flashq.caches.step import Step


class PagedCache:
    """Keys and values of all layers of a model, in pages that sequences take as they grow.

    A model integration does this for every forward pass, whatever sequences it serves in it::

        step = cache.extend(sequences, counts)              # host: pages, tables; once for all layers
        for layer in range(cache.num_layers):
            out, lse = step.attend(layer, q, k, v, ...)     # device: append k and v, attend with q

    with k and v (T, Hkv, D) the new tokens after RoPE, packed sequence by sequence, and q (T, Hq, D); (B, S, heads, D)
    works where all sequences get S tokens. Sequences are integers: `alloc` makes an empty one, `fork` one that shares
    all pages so far, `truncate` takes tokens back, `free` ends one. `extend` either makes room for all or raises
    `CacheFullError` and changes nothing.

    Not thread-safe, and one stream at a time: pages are used again in the order of the calls.
    """

    _exact_table: int | None = None
    _attends_prompts = False  # there is an `_attend_prompt`

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        num_pages: int,
        page_size: int = 64,
        max_sequences: int = 64,
        max_length: int | None = None,
        window_left: int | SequenceOf[int] = -1,
        window_pages: int | None = None,
        slack: int = 16,
        max_chunk: int = 4096,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        where = type(self).__name__
        self.num_layers = num_layers = as_integer(where, "num_layers", num_layers, 1)
        self.kv_heads = as_integer(where, "kv_heads", kv_heads, 1)
        self.head_dim = as_integer(where, "head_dim", head_dim)
        self.num_pages = as_integer(where, "num_pages", num_pages)
        self.page_size = as_integer(where, "page_size", page_size, 1)
        self.max_sequences = as_integer(where, "max_sequences", max_sequences, 1)
        self.slack = as_integer(where, "slack", slack)
        self.max_chunk = as_integer(where, "max_chunk", max_chunk, 1)
        if max_length is None:
            max_length = min(self.num_pages * self.page_size, MOST_TOKENS)
        self.max_length = as_integer(where, "max_length", max_length)
        if window_pages is not None:
            window_pages = as_integer(where, "window_pages", window_pages)
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            self._refuse("", "dtype", "torch.float16, torch.bfloat16 or torch.float32", str(dtype))
        windows = as_integers(where, "window_left", window_left)
        windows = [windows] * num_layers if isinstance(windows, int) else windows
        if len(windows) != num_layers or not all(-1 <= window <= MOST_TOKENS for window in windows):
            refuse(where, "window_left", f"-1 to {MOST_TOKENS}, one for all or each of {num_layers} layers", windows)
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            self._refuse("", "device", "one that PyTorch knows", repr(device))
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.window_left = windows
        self._kinds = list(dict.fromkeys(windows))
        self._tables: list[PageTable] = []
        for window in self._kinds:
            if window == -1:
                self._add_table("pages", self.page_size)
            else:
                self._add_table(f"pages of window {window}", self.page_size, window_pages, window)
        self._layers = [  # of every layer: its table, and its place among the layers of its kind
            (self._kinds.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)
        ]
        self._sequences: dict[int, Sequence] = {}
        self._free_rows = list(range(self.max_sequences - 1, -1, -1))
        self._next_handle = 0
        self._stale: list[int] = []  # of the latest step: they may hold pages that it alone needed
        self._generation = 0

    # --- construction -------------------------------------------------------------------------------------------------

    def _where(self, method: str) -> str:
        return type(self).__name__ + (f".{method}" if method else "")

    def _refuse(self, method: str, argument: str, expected: str, got: Any) -> NoReturn:
        refuse(self._where(method), argument, expected, got)

    def _add_table(
        self, name: str, page_size: int, num_pages: int | None = None, reach: int | None = None, first: int = 0
    ) -> PageTable:
        """A table with a pool of num_pages; None: as many as are always enough."""
        table = PageTable(
            type(self).__name__, name, page_size, self.max_sequences, count_pages(self.max_length, page_size),
            reach=reach, slack=self.slack, first=first,
        )  # fmt: skip
        self._tables.append(table)
        enough = self._pool_size(len(self._tables) - 1, self.num_pages, self.max_sequences)
        table.pool.resize(enough if num_pages is None else num_pages)
        return table

    def _pool_size(self, table: int, num_pages: int, max_sequences: int) -> int:
        """Pages of a table in a cache of such a size."""
        if self._tables[table].reach is None:
            return num_pages
        pages = self._tables[table].most_pages(max_sequences, self.max_chunk)
        return pages if table == self._exact_table else min(pages, num_pages)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that can be written in and outside of inference mode, wherever the cache is made."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _use(self, planes: list[dict[str, Tensor]], index: Index[Tensor]) -> None:
        """Go on with these planes (layers, pages, ...) of every table, and these tensors for steps."""
        self._planes, self._index = planes, index
        self._layer_planes: list[dict[str, Tensor]] = []  # the same by layer, (pages, ...)
        for layer, (kind, place) in enumerate(self._layers):
            of_layer = {name: plane[place] for name, plane in planes[kind].items()}
            if self._exact_table is not None:
                of_layer |= {name: plane[layer] for name, plane in planes[self._exact_table].items()}
            self._layer_planes.append(of_layer)

    def _new_index(self, max_sequences: int, max_length: int) -> Index[Tensor]:
        return shared_index(self._tables, max_sequences, max_length, self._zeros)

    def reserve(
        self, *, num_pages: int | None = None, max_sequences: int | None = None, max_length: int | None = None
    ) -> None:
        """Make the cache larger, with all that it holds, or raise and leave it as it was (its tensors are held until
        the new ones are filled). Tensors are new: graphs and steps made before it have ended.

        Args:
            num_pages, max_sequences, max_length: as in the constructor, with max_length at least all pages; None, or
                less than there is: as it was. Pools of windows and of exact tokens get what so many sequences need.
        """
        sizes = {"num_pages": num_pages, "max_sequences": max_sequences, "max_length": max_length}
        grow.reserve(self, *(as_integer(self._where("reserve"), name, size or 0) for name, size in sizes.items()))

    # --- sequences ----------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[int]:
        """All sequences, oldest first."""
        return list(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, padding included."""
        return self._find("length", sequence).length

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the cache on its device."""
        return sum(t.nbytes for t in self._index) + sum(t.nbytes for planes in self._planes for t in planes.values())

    @property
    def nbytes_in_use(self) -> int:
        """Bytes of the pages that sequences hold; the rest of `nbytes` is room."""
        total = 0
        for table, planes in zip(self._tables, self._planes, strict=True):
            total += sum(t[:, 0].nbytes for t in planes.values() if t.shape[1]) * table.pool.in_use
        return total

    @property
    def pages_in_use(self) -> dict[str, tuple[int, int]]:
        """Pages in use and pages in all, by pool."""
        return {table.name: (table.pool.in_use, table.pool.size) for table in self._tables}

    def alloc(self, kv_start: int = 0) -> int:
        """A new, empty sequence.

        Args:
            kv_start: so many of its first tokens are padding: invisible, and not stored where they fill a page.

        Raises:
            CacheFullError: there are `max_sequences` already.
        """
        return self._new("alloc", as_integer(self._where("alloc"), "kv_start", kv_start, most=MOST_TOKENS))

    def pad(self, sequence: int, kv_start: int) -> None:
        """Raise `kv_start` of a sequence that consists of padding so far. Raises ValueError where it does not, and for
        a lower one: pages of padding were not kept."""
        state = self._find("pad", sequence)
        kv_start = as_integer(
            self._where("pad"), "kv_start", kv_start, state.kv_start,
            expected=f"at least the present {state.kv_start}, at most {MOST_TOKENS}",
        )  # fmt: skip
        if state.length > state.kv_start:
            self._refuse("pad", "kv_start", f"at least {state.length}, of tokens that are all padding", kv_start)
        state.kv_start = kv_start
        self._generation += 1

    def _new(self, method: str, kv_start: int) -> int:
        if not self._free_rows:
            raise CacheFullError(
                f"flashq.{type(self).__name__}.{method}: max_sequences: expected fewer than {self.max_sequences} "
                f"sequences, got {len(self._sequences)}"
            )
        return self._admit(Sequence(self._free_rows[-1], kv_start=kv_start))

    def _admit(self, sequence: Sequence) -> int:
        """A handle for a sequence in the row that is free next."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._free_rows.pop()
        self._sequences[handle] = sequence
        return handle

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens: pages are shared, and a partly filled last one is copied when either
        appends to it. Raises `CacheFullError` when there are `max_sequences` already."""
        source = self._find("fork", sequence)
        handle = self._new("fork", source.kv_start)
        target = self._sequences[handle]
        target.length = source.length
        for table in self._tables:
            table.trim(source, [])
            table.fork(source, target)
        return handle

    def truncate(self, sequences: int | SequenceOf[int], lengths: int | SequenceOf[int]) -> None:
        """Keep the first tokens of sequences, of all or of none. Steps made before it have ended.

        Args:
            sequences: one or several, each once.
            lengths: how many tokens each keeps; a number stands for all.

        Raises:
            ValueError: a length that a sequence does not have, or one at which a window would reach back to pages
                that were released already, or the next token belong into one: more than `slack` tokens were taken back
                since it was longest.
        """
        _, states, lengths = self._batch("truncate", sequences, lengths, "lengths")
        with all_or_nothing() as journal:
            self._trim(states, journal)
            for state, length in zip(states, lengths, strict=True):
                if length > state.length:
                    self._refuse("truncate", "lengths", f"0 to {state.length}", length)
                for window, table in zip(self._kinds, self._tables, strict=False):
                    if not table.holds_window(state, length, table.trimmed[state.row]):
                        self._refuse(
                            "truncate", "lengths",
                            f"at least {table.held_from(state) + window}, because earlier pages of window {window} are "
                            "released (a larger slack keeps more)", length,
                        )  # fmt: skip
        for state, length in zip(states, lengths, strict=True):
            self._shorten(state, length)

    def _shorten(self, state: Sequence, length: int) -> None:
        for table in self._tables:
            table.truncate(state, length)
        state.length = length
        self._generation += 1

    def free(self, sequence: int) -> None:
        """End a sequence; its pages are free where no fork uses them. Steps made before it have ended."""
        state = self._find("free", sequence)
        self._shorten(state, 0)
        del self._sequences[int(sequence)]
        self._free_rows.append(state.row)

    def select(self, sequences: SequenceOf[int], indices: SequenceOf[int]) -> list[int]:
        """What beam search asks for: the sequences at these indices. The others are freed, a repeated one is forked."""
        sequences, _, _ = self._batch("select", sequences, 0)
        indices = as_integers(self._where("select"), "indices", indices)
        if isinstance(indices, int) or not all(0 <= i < len(sequences) for i in indices):
            self._refuse("select", "indices", f"a list of 0 to {len(sequences) - 1}", indices)
        if len(indices) - len(sequences) > len(self._free_rows):
            raise CacheFullError(
                f"flashq.{type(self).__name__}.select: max_sequences: expected at most {self.max_sequences}, got "
                f"{len(self._sequences) + len(indices) - len(sequences)}"
            )
        for i in set(range(len(sequences))) - set(indices):
            self.free(sequences[i])
        first = {i: at for at, i in reversed(list(enumerate(indices)))}
        return [sequences[i] if first[i] == at else self.fork(sequences[i]) for at, i in enumerate(indices)]

    def save(self, path: str | os.PathLike[str], sequences: SequenceOf[int] | None = None) -> None:
        """Write sequences (None: all) to a safetensors file, with a header and a checksum; pages that they share once.

        Raises:
            ImportError: the package safetensors is not installed.
        """
        files.save(self, path, self._batch("save", self.sequences if sequences is None else sequences, 0)[1])

    def load(self, path: str | os.PathLike[str]) -> list[int]:
        """Add the sequences of a file of `save`; returns them in the order in which they were saved.

        Steps made before it have ended. The cache has to be of the same kind and layout; its capacities may differ.

        Raises:
            CacheFileError: the file is damaged, or of another kind, version, layout or code table.
            CacheFullError: not enough room; nothing changed.
            ImportError: the package safetensors is not installed.
        """
        return files.load(self, path)

    def _layout(self) -> dict[str, Any]:
        """All that the bytes of a page depend on."""
        return {
            "num_layers": self.num_layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "page_size": self.page_size, "window_left": self.window_left, "dtype": str(self.dtype),
        }  # fmt: skip

    def _find(self, method: str, sequence: int) -> Sequence:
        expected = "one of the cache's sequences"
        handle = as_integer(self._where(method), "sequence", sequence, most=self._next_handle, expected=expected)
        if handle not in self._sequences:
            self._refuse(method, "sequence", expected, handle)
        return self._sequences[handle]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _batch(
        self, method: str, sequences: int | SequenceOf[int], numbers: int | SequenceOf[int], name: str = "counts"
    ) -> tuple[list[int], list[Sequence], list[int]]:
        """Sequences, what is known of them, and a number of at least 0 for each, called `name`."""
        handles = as_integers(self._where(method), "sequences", sequences)
        handles = [handles] if isinstance(handles, int) else handles
        values = as_integers(self._where(method), name, numbers)
        values = [values] * len(handles) if isinstance(values, int) else values
        states = [self._find(method, handle) for handle in handles]
        if len(set(handles)) != len(handles):
            self._refuse(method, "sequences", "each once", handles)
        if len(values) != len(handles) or any(value < 0 for value in values):
            self._refuse(method, name, f"one of at least 0 for each of {len(handles)} sequences", values)
        return handles, states, values

    def extend(self, sequences: int | SequenceOf[int], counts: int | SequenceOf[int] = 1) -> Step:
        """Make room for more tokens; the step that is returned writes and attends them, layer by layer.

        Args:
            sequences: one or several, each once.
            counts: how many tokens each gets; a number stands for all.

        Raises:
            CacheFullError: not enough free pages, or a sequence would get longer than `max_length`; nothing changed.
            ValueError: an unknown sequence, one named twice, or counts that do not fit.
        """
        handles, states, counts = self._batch("extend", sequences, counts)
        for state, count in zip(states, counts, strict=True):
            if state.length + count > self.max_length:
                raise CacheFullError(
                    f"flashq.{type(self).__name__}.extend: max_length: expected at most {self.max_length} tokens, got "
                    f"{state.length} + {count}"
                )
        copies: list[list[tuple[int, int]]] = [[] for _ in self._tables]
        with all_or_nothing() as journal:
            rest = set(self._stale).intersection(self._sequences).difference(handles)
            self._trim(states + [self._sequences[handle] for handle in rest], journal)
            for state, count in zip(states, counts, strict=True):
                for table, pairs in zip(self._tables, copies, strict=True):
                    if count:
                        table.make_writable(state, pairs, journal)
            parts = split_counts(counts, self.max_chunk)
            stable = len(parts) == 1 and max(counts, default=0) <= STABLE_TOKENS
            prompt = plan_prompt(states, counts) if self._attends_prompts and not stable else None
            plans, begin = [], 0
            for first, part in parts:
                members = states[first : first + len(part)]
                for state, count in zip(members, part, strict=True):
                    self._grow(state, count, journal)
                plans.append(plan_chunk(self._tables, members, part, begin))
                begin += sum(part)
                if len(plans) < len(parts):
                    self._trim(members, journal)
            self._generation += 1  # the tensors of the step before are about to change
            for planes, pairs in zip(self._planes, copies, strict=True):
                self._copy_pages(planes, pairs)
            chunks = [upload(plan, self.device, self._index if stable else None) for plan in plans]
            prompt = prompt and upload(prompt, self.device)
        self._stale = handles
        return Step(self, counts, chunks, prompt)

    def lookup(self, sequences: int | SequenceOf[int], counts: int | SequenceOf[int] = 1) -> Step:
        """A step that only attends: queries that stand at the last `counts` tokens of each sequence.

        It has tensors of its own, so it can be used beside the latest step of `extend`; until the next one.
        """
        _, states, counts = self._batch("lookup", sequences, counts)
        if sum(counts) > MOST_TOKENS:
            self._refuse("lookup", "counts", f"at most {MOST_TOKENS} tokens in all", sum(counts))
        for window, table in zip(self._kinds, self._tables, strict=False):
            for state, count in zip(states, counts, strict=True):
                if window != -1 and max(state.kv_start, state.length - count - window) < table.held_from(state):
                    self._refuse("lookup", "counts", f"queries whose window {window} is still held", count)
        plan = plan_chunk(self._tables, states, counts, appends=False)
        return Step(self, counts, [upload(plan, self.device)], appends=False)

    def _trim(self, states: list[Sequence], journal: Journal) -> None:
        for state in states:
            for table in self._tables:
                table.trim(state, journal)

    def _grow(self, state: Sequence, count: int, journal: Journal) -> None:
        for table in self._tables:
            table.extend(state, count, journal)
        journal.append((setattr, (state, "length", state.length)))
        state.length += count

    def _copy_pages(self, planes: dict[str, Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            old, new = to_device(np.array(pairs, dtype=np.int64).T, self.device)
            for plane in planes.values():
                plane[:, new] = plane[:, old]

    # --- what the kinds of cache do -----------------------------------------------------------------------------------

    def _write(self, layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError

    def _attend(
        self, layer: int, chunk: Chunk, q: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _attend_prompt(
        self, layer: int, prompt: Prompt, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """What `_attend` gives where k and v are all that there is."""
        raise NotImplementedError
