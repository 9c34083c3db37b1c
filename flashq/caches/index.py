"""The index tensors of a step: which tokens it has, and the pages and slots of every table that they lie in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flashq.caches.pages import PageTable, Sequence, count_pages

STABLE_TOKENS = 16
"""Steps with at most so many tokens a sequence use tensors that stay where they are."""

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass
class Index(Generic[Array]):
    """What ops are told of B sequences: seqlens and kv_start int32 (B), cu_seqlens int32 (B + 1), for every page table
    block_tables int32 (B, pages) and slots int64 (T)."""

    seqlens: Array
    kv_start: Array
    cu_seqlens: Array
    block_tables: list[Array]
    slots: list[Array]

    def __iter__(self) -> Iterator[Array]:
        return chain((self.seqlens, self.kv_start, self.cu_seqlens), self.block_tables, self.slots)


@dataclass
class Chunk(Index[Array]):
    """A part of a step's packed tokens, small enough for the exact pool."""

    begin: int
    end: int
    longest: int
    """The most tokens of a sequence."""


@dataclass
class Prompt(Generic[Array]):
    """The packed tokens of sequences that have no others: what they see is among them.

    cu_seqlens int32 (segments + 1): a segment for every sequence, or two, of padding and of tokens; `padding` then is
    bool (T), else None.
    """

    cu_seqlens: Array
    padding: Array | None
    longest: int
    """The most tokens of a segment."""


def shared_index(tables: list[PageTable], rows: int, max_length: int, zeros: Callable[..., Tensor]) -> Index[Tensor]:
    """Room for the tensors of steps of up to `rows` sequences; `zeros` makes a tensor."""
    widths = [count_pages(max_length, table.page_size) for table in tables]
    return Index(
        *(zeros(size, dtype=torch.int32) for size in (rows, rows, rows + 1)),
        [zeros(rows, width, dtype=torch.int32) for width in widths],
        [zeros(rows * STABLE_TOKENS, dtype=torch.int64) for _ in widths],
    )


def split_counts(counts: list[int], most: int) -> list[tuple[int, list[int]]]:
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


def plan_chunk(
    tables: list[PageTable], states: list[Sequence], counts: list[int], begin: int = 0, *, appends: bool = True
) -> Chunk[np.ndarray]:
    """The last `counts` tokens of sequences, as their tables are now; slots only where the tokens are appended."""
    rows = np.array([state.row for state in states], dtype=np.int64)
    added = np.array(counts, dtype=np.int64)
    lengths = np.array([state.length for state in states], dtype=np.int64)
    starts = np.minimum(np.array([state.kv_start for state in states], dtype=np.int64), lengths)
    ends = np.concatenate([[0], np.cumsum(added)])
    if appends:
        owner = np.repeat(np.arange(len(states)), added)
        position = np.arange(ends[-1]) - ends[owner] + (lengths - added)[owner]
    block_tables, slots = [], []
    for table in tables:
        used = count_pages(int(lengths.max(initial=0)), table.page_size)
        block_tables.append(table.pages[rows, :used])
        if appends:
            pages = table.pages[rows[owner], position // table.page_size].astype(np.int64)
            slots.append(np.where(pages < 0, -1, pages * table.page_size + position % table.page_size))
    return Chunk(
        *(x.astype(np.int32) for x in (lengths, starts, ends)), block_tables, slots,
        begin, begin + int(ends[-1]), int(added.max(initial=0)),
    )  # fmt: skip


def plan_prompt(states: list[Sequence], counts: list[int]) -> Prompt[np.ndarray] | None:
    """What `counts` tokens are to sequences before they get them: None if one has tokens that are no padding."""
    if any(state.length > state.kv_start for state in states):
        return None
    padding = [min(count, state.kv_start - state.length) for state, count in zip(states, counts, strict=True)]
    sizes = np.array(counts, dtype=np.int64)
    is_padding = None
    if any(padding):
        sizes = np.stack([padding, sizes - padding], axis=1).ravel()
        is_padding = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return Prompt(ends, is_padding, int(sizes.max(initial=0)))


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on a device. From pinned memory: the host does not wait."""
    return _pinned(values, device).to(device, non_blocking=True)


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if device.type == "cuda" else host


def upload(plan: Any, device: torch.device, homes: Index[Tensor] | None = None) -> Any:
    """A `Chunk` or `Prompt` with tensors for its arrays: new ones, or the first elements of `homes`."""

    def place(values: np.ndarray, home: Tensor | None) -> Tensor:
        if home is None:
            return to_device(values, device)
        target = home[: len(values)]
        (target if values.ndim == 1 else target[:, : values.shape[1]]).copy_(_pinned(values, device), non_blocking=True)
        return target

    placed: dict[str, Any] = {}
    for name, values in vars(plan).items():
        home = getattr(homes, name, None)
        if isinstance(values, np.ndarray):
            placed[name] = place(values, home)
        elif isinstance(values, list):
            placed[name] = [place(x, home and home[i]) for i, x in enumerate(values)]
    return dataclasses.replace(plan, **placed)
