"""The bookkeeping that 16-bit and 4-bit caches share."""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashq.caches import files, grow
from flashq.caches.pages import CacheFullError, Journal, PageTable, Sequence, all_or_nothing, count_pages
from flashq.caches.step import Chunk, Step

STABLE_TOKENS = 16  # a sequence, of the steps that use preallocated slots


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
        for name, value, least in (
            ("num_layers", num_layers, 1), ("kv_heads", kv_heads, 1), ("num_pages", num_pages, 0),
            ("page_size", page_size, 1), ("max_sequences", max_sequences, 1), ("slack", slack, 0),
            ("max_chunk", max_chunk, 1),
        ):  # fmt: skip
            if value < least:
                self._refuse("", name, f"at least {least}", str(value))
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            self._refuse("", "dtype", "torch.float16, torch.bfloat16 or torch.float32", str(dtype))
        windows = [window_left] * num_layers if isinstance(window_left, int) else list(window_left)
        if len(windows) != num_layers or min(windows) < -1:
            self._refuse("", "window_left", f"-1 or more, one for all or one for each of {num_layers} layers", windows)
        self.num_layers, self.kv_heads, self.head_dim = num_layers, kv_heads, head_dim
        self.num_pages = num_pages
        self.page_size, self.max_sequences, self.slack, self.max_chunk = page_size, max_sequences, slack, max_chunk
        self.max_length = num_pages * page_size if max_length is None else max_length
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.window_left = windows
        self._kinds = list(dict.fromkeys(windows))
        self._tables: list[PageTable] = []
        for window in self._kinds:
            pages = num_pages
            if window != -1:
                pages = self._pages_of(window, page_size) if window_pages is None else window_pages
                pages = min(num_pages, pages)
            self._add_table("pages" if window == -1 else f"pages of window {window}", page_size, pages,
                            None if window == -1 else window)  # fmt: skip
        self._layers = [  # of every layer: its table, and its place among the layers of its kind
            (self._kinds.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)
        ]
        self._planes: list[dict[str, Tensor]] = []  # of every table: planes (layers, pages, ...)
        self._sequences: dict[int, Sequence] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._next_handle = 0
        self._stale: list[int] = []  # of the latest step: they may hold pages that it alone needed
        self._generation = 0

    # --- construction -------------------------------------------------------------------------------------------------

    def _refuse(self, method: str, argument: str, expected: str, got: Any) -> None:
        where = type(self).__name__ + (f".{method}" if method else "")
        raise ValueError(f"flashq.{where}: {argument}: expected {expected}, got {got}")

    def _pages_of(self, recent: int, page_size: int, first: int | None = None) -> int:
        """Pages always enough for a sequence's `recent` and `first` tokens: slack, both ends, a chunk on top."""
        pinned = 0 if first is None else count_pages(first + page_size - 1, page_size)
        a_sequence = count_pages(recent + self.slack, page_size) + 2 + pinned
        return self.max_sequences * a_sequence + count_pages(self.max_chunk, page_size)

    def _add_table(self, name: str, page_size: int, num_pages: int, reach: int | None, first: int = 0) -> None:
        width = count_pages(self.max_length, page_size)
        self._tables.append(
            PageTable(type(self).__name__, name, page_size, num_pages, self.max_sequences, width, reach=reach,
                      slack=self.slack, first=first)
        )  # fmt: skip

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that can be written in and outside of inference mode, wherever the cache is made."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _allocate(self) -> None:
        """The tensors that steps share. Values come from the host; addresses stay."""
        rows = self.max_sequences
        self._seqlens, self._kv_start = (self._zeros(rows, dtype=torch.int32) for _ in range(2))
        self._cu_seqlens = self._zeros(rows + 1, dtype=torch.int32)
        self._block_tables = [self._zeros(*table.pages.shape, dtype=torch.int32) for table in self._tables]
        self._slots = [self._zeros(rows * STABLE_TOKENS, dtype=torch.int64) for _ in self._tables]

    def reserve(
        self, *, num_pages: int | None = None, max_sequences: int | None = None, max_length: int | None = None
    ) -> None:
        """Make the cache larger, with all that it holds. Tensors are new: graphs and steps made before it have ended.

        Args:
            num_pages, max_sequences, max_length: as in the constructor, with max_length at least all pages; None, or
                less than there is: as it was. Pools of windows and of exact tokens get what so many sequences need.
        """
        grow.reserve(self, num_pages or 0, max_sequences or 0, max_length or 0)

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
        tensors = [self._seqlens, self._kv_start, self._cu_seqlens, *self._block_tables, *self._slots]
        return sum(t.nbytes for t in tensors) + sum(t.nbytes for planes in self._planes for t in planes.values())

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
        return {table.name: (table.pool.in_use, len(table.pool.users)) for table in self._tables}

    def alloc(self, kv_start: int = 0) -> int:
        """A new, empty sequence.

        Args:
            kv_start: so many of its first tokens are padding: invisible, and not stored where they fill a page.

        Raises:
            CacheFullError: there are `max_sequences` already.
        """
        if kv_start < 0:
            self._refuse("alloc", "kv_start", "at least 0", kv_start)
        return self._new("alloc", kv_start)

    def pad(self, sequence: int, kv_start: int) -> None:
        """Raise `kv_start` of a sequence that consists of padding so far. Raises ValueError where it does not, and for
        a lower one: pages of padding were not kept."""
        state = self._find("pad", sequence)
        if kv_start < state.kv_start:
            self._refuse("pad", "kv_start", f"at least the present {state.kv_start}", kv_start)
        if state.length > state.kv_start:
            self._refuse("pad", "kv_start", f"at least {state.length}, of tokens that are all padding", kv_start)
        state.kv_start = kv_start

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

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            ValueError: a length that the sequence does not have, or one at which a window would reach back to pages
                that were released already: more than `slack` tokens were taken back since it was longest.
        """
        state = self._find("truncate", sequence)
        if not 0 <= length <= state.length:
            self._refuse("truncate", "length", f"0 to {state.length}", length)
        for table in self._tables:
            table.trim(state, [])
        for window, table in zip(self._kinds, self._tables, strict=False):
            least = max(state.kv_start, length - window)  # what the next token sees
            if window != -1 and least < min(length, table.held_from(state)):
                self._refuse(
                    "truncate", "length",
                    f"at least {table.held_from(state) + window}, because earlier pages of window {window} are "
                    "released (a larger slack keeps more)", length,
                )  # fmt: skip
        for table in self._tables:
            table.truncate(state, length)
        state.length = length

    def free(self, sequence: int) -> None:
        """End a sequence; its pages are free where no fork uses them."""
        state = self._find("free", sequence)
        for table in self._tables:
            table.truncate(state, 0)
        del self._sequences[sequence]
        self._free_rows.append(state.row)

    def select(self, sequences: SequenceOf[int], indices: SequenceOf[int]) -> list[int]:
        """What beam search asks for: the sequences at these indices. The others are freed, a repeated one is forked."""
        for sequence in sequences:
            self._find("select", sequence)
        if len(set(sequences)) != len(sequences) or not all(0 <= i < len(sequences) for i in indices):
            self._refuse("select", "indices", f"0 to {len(sequences) - 1}, of sequences that differ", list(indices))
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
        files.save(self, path, self.sequences if sequences is None else sequences)

    def load(self, path: str | os.PathLike[str]) -> list[int]:
        """Add the sequences of a file of `save`; returns them in the order in which they were saved.

        The cache has to be of the same kind and layout; its capacities may differ.

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
        if sequence not in self._sequences:
            self._refuse(method, "sequence", "one of the cache's sequences", sequence)
        return self._sequences[sequence]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _batch(
        self, method: str, sequences: int | SequenceOf[int], counts: int | SequenceOf[int]
    ) -> tuple[list[int], list[Sequence], list[int]]:
        handles = [sequences] if isinstance(sequences, int) else list(sequences)
        numbers = [counts] * len(handles) if isinstance(counts, int) else list(counts)
        states = [self._find(method, handle) for handle in handles]
        if len(set(handles)) != len(handles):
            self._refuse(method, "sequences", "each once", handles)
        if len(numbers) != len(handles) or any(number < 0 for number in numbers):
            self._refuse(method, "counts", f"one of at least 0 for each of {len(handles)} sequences", numbers)
        return handles, states, numbers

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
            parts = _split(counts, self.max_chunk)
            stable = len(parts) == 1 and sum(counts) <= len(self._slots[0])
            chunks, begin = [], 0
            for first, part in parts:
                members = states[first : first + len(part)]
                for state, count in zip(members, part, strict=True):
                    self._grow(state, count, journal)
                chunks.append(self._upload(members, part, begin, stable))
                begin += sum(part)
                if len(chunks) < len(parts):
                    self._trim(members, journal)
            for planes, pairs in zip(self._planes, copies, strict=True):
                self._copy_pages(planes, pairs)
        self._stale = handles
        self._generation += 1
        return Step(self, counts, chunks, appends=True)

    def lookup(self, sequences: int | SequenceOf[int], counts: int | SequenceOf[int] = 1) -> Step:
        """A step that only attends: queries that stand at the last `counts` tokens of each sequence.

        It has tensors of its own, so it can be used beside the latest step of `extend`; until the next one.
        """
        _, states, counts = self._batch("lookup", sequences, counts)
        for window, table in zip(self._kinds, self._tables, strict=False):
            for state, count in zip(states, counts, strict=True):
                if window != -1 and max(state.kv_start, state.length - count - window) < table.held_from(state):
                    self._refuse("lookup", "counts", f"queries whose window {window} is still held", count)
        chunk = self._upload(states, counts, 0, stable=False, appends=False)
        return Step(self, counts, [chunk], appends=False)

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
            old, new = self._to_device(np.array(pairs, dtype=np.int64).T)
            for plane in planes.values():
                plane[:, new] = plane[:, old]

    def _to_device(self, values: np.ndarray, to: Tensor | None = None) -> Tensor:
        """A copy on the cache's device, in `to` where given. Pinned memory: the host does not wait."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True) if to is None else to.copy_(host, non_blocking=True)

    def _upload(
        self, states: list[Sequence], counts: list[int], begin: int, stable: bool, appends: bool = True
    ) -> Chunk:
        """The index tensors of a chunk: of new ones, or in those that steps share."""
        rows = np.array([state.row for state in states], dtype=np.int64)
        added = np.array(counts, dtype=np.int64)
        lengths = np.array([state.length for state in states], dtype=np.int64)
        starts = np.minimum([state.kv_start for state in states], lengths)
        ends = np.concatenate([[0], np.cumsum(added)])
        batch, tokens = len(states), int(ends[-1])
        owner = np.repeat(np.arange(batch), added)
        position = np.arange(tokens) - ends[owner] + (lengths - added)[owner]

        def place(values: np.ndarray, home: Tensor, dtype: Any = np.int32) -> Tensor:
            values = values.astype(dtype)
            if not stable:
                return self._to_device(values)
            part = home[: len(values)] if values.ndim == 1 else home[: values.shape[0], : values.shape[1]]
            self._to_device(values, part)
            return home[: len(values)]

        tables, slots = [], []
        for table, block_table, slot in zip(self._tables, self._block_tables, self._slots, strict=True):
            used = count_pages(int(lengths.max(initial=0)), table.page_size)
            tables.append(place(table.pages[rows, :used], block_table))
            if appends:
                pages = table.pages[rows[owner], position // table.page_size].astype(np.int64)
                at = np.where(pages < 0, -1, pages * table.page_size + position % table.page_size)
                slots.append(place(at, slot, np.int64))
        return Chunk(
            begin, begin + tokens, place(lengths, self._seqlens), place(starts, self._kv_start),
            place(ends, self._cu_seqlens), tables, slots, int(added.max(initial=0)),
        )  # fmt: skip

    # --- what the kinds of cache do -----------------------------------------------------------------------------------

    def _write(self, layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError

    def _attend(
        self, layer: int, chunk: Chunk, q: Tensor, sinks: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def _split(counts: list[int], most: int) -> list[tuple[int, list[int]]]:
    """Cut packed tokens into chunks of at most `most`: of each, its first sequence and the tokens of every one."""
    chunks: list[tuple[int, list[int]]] = []
    room = 0
    for index, count in enumerate(counts):
        while True:
            if not chunks or (room == 0 and count > 0):
                chunks.append((index, []))
                room = most
            part = min(count, room)
            chunks[-1][1].append(part)
            room, count = room - part, count - part
            if count == 0:
                break
    return chunks or [(0, [])]
