"""Pages of a cache on the host: who uses which, and every sequence's table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np


class CacheFullError(RuntimeError):
    """A cache has no room for what was asked: too few free pages, sequences or positions. It is left as it was."""


def count_pages(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens, the last perhaps in part."""
    return -(-tokens // page_size)


Journal = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""How to undo what was done so far: calls to make in reverse order."""


@contextmanager
def all_or_nothing() -> Iterator[Journal]:
    """What the block changes and notes in the journal is undone when an exception leaves it."""
    journal: Journal = []
    try:
        yield journal
    except BaseException:
        for function, arguments in reversed(journal):
            function(*arguments)
        raise


@dataclass
class Sequence:
    """A sequence of a cache: its row in the tables, its tokens, and how many of the first are padding."""

    row: int
    length: int = 0
    kv_start: int = 0


class PagePool:
    """Pages in use and free ones; `users` counts the tables that name a page."""

    def __init__(self) -> None:
        self.users: list[int] = []
        self.free: list[int] = []  # the end comes first

    @property
    def size(self) -> int:
        return len(self.users)

    @property
    def in_use(self) -> int:
        return self.size - len(self.free)

    def resize(self, num_pages: int) -> None:
        """Add free pages, which are taken when the others are in use."""
        old = self.size
        self.users += [0] * (num_pages - old)
        self.free[:0] = range(num_pages - 1, old - 1, -1)

    def take(self, journal: Journal) -> int | None:
        """A free page with one user, or None."""
        if not self.free:
            return None
        page = self.free.pop()
        self.users[page] = 1
        journal.append((self.release, (page, [])))
        return page

    def share(self, page: int) -> None:
        self.users[page] += 1

    def release(self, page: int, journal: Journal) -> None:
        """One user less; nobody's page is free."""
        self.users[page] -= 1
        if self.users[page] == 0:
            self.free.append(page)
        journal.append((self._take_back, (page,)))

    def _take_back(self, page: int) -> None:
        """Undo the latest release."""
        if self.users[page] == 0:
            self.free.pop()
        self.users[page] += 1


def count_named(named: np.ndarray) -> int | None:
    """How many pages a table (sequences, width) names by number, -1 none. None: it is no such table, because a number
    is left out, or one stands for different parts of a sequence."""
    rows, columns = np.nonzero(named >= 0)
    uses = np.unique(np.stack([named[rows, columns], columns]), axis=1)  # every page with every part it stands for
    pages = uses.shape[1]
    return pages if named.min(initial=-1) >= -1 and np.array_equal(uses[0], np.arange(pages)) else None


class PageTable:
    """The pages of every sequence for one kind of layers, or for the exact pool; -1 where a page is not held.

    Page i of a sequence holds its tokens [i * page_size, (i + 1) * page_size). All pages from `trimmed` on are held; of
    those before, only pinned ones.

    Args:
        owner: the cache's name, for messages.
        name: what the pool is for, for messages.
        page_size: tokens a page.
        rows: sequences at most.
        width: pages a sequence at most.
        reach: how many tokens before a query at the sequence's end are still read; None: all, -1: none.
        slack: tokens that are kept beyond that, so that so many can be taken back.
        first: so many tokens from kv_start on are pinned: their pages are held as long as the sequence lives.
    """

    def __init__(
        self,
        owner: str,
        name: str,
        page_size: int,
        rows: int,
        width: int,
        *,
        reach: int | None = None,
        slack: int = 0,
        first: int = 0,
    ) -> None:
        self.owner, self.name, self.page_size = owner, name, page_size
        self.reach, self.slack, self.first = reach, slack, first
        self.pool = PagePool()
        self.pages = np.full((rows, width), -1, dtype=np.int32)
        self.trimmed = [0] * rows

    def grown(self, rows: int, width: int) -> np.ndarray:
        """The table with room for more sequences, and pages a sequence."""
        pages = np.full((rows, width), -1, dtype=np.int32)
        pages[: self.pages.shape[0], : self.pages.shape[1]] = self.pages
        return pages

    def resize(self, num_pages: int, pages: np.ndarray) -> None:
        """Go on with more pages in the pool, and a table of `grown`."""
        self.pool.resize(num_pages)
        self.trimmed += [0] * (len(pages) - len(self.trimmed))
        self.pages = pages

    def most_pages(self, sequences: int, chunk: int) -> int:
        """Pages that are always enough for so many sequences: for what they read, slack, both ends, and a chunk."""
        first = count_pages(self.first + self.page_size - 1, self.page_size) if self.first else 0
        recent = count_pages(self.reach + 1 + self.slack, self.page_size) + 2
        return sequences * (first + recent) + count_pages(chunk, self.page_size)

    def _put(self, row: int, index: int, page: int, journal: Journal) -> None:
        journal.append((self.pages.__setitem__, ((row, index), int(self.pages[row, index]))))
        self.pages[row, index] = page

    def _set_trimmed(self, row: int, index: int, journal: Journal) -> None:
        journal.append((self.trimmed.__setitem__, (row, self.trimmed[row])))
        self.trimmed[row] = index

    def _drop(self, row: int, index: int, journal: Journal) -> None:
        page = int(self.pages[row, index])
        if page >= 0:
            self._put(row, index, -1, journal)
            self.pool.release(page, journal)

    def _take(self, journal: Journal) -> int:
        page = self.pool.take(journal)
        if page is None:
            raise CacheFullError(
                f"flashq.{self.owner}: {self.name}: expected a free page, got none (all {self.pool.size} are in "
                "use): free or truncate sequences, or make the cache larger"
            )
        return page

    def is_pinned(self, sequence: Sequence, index: int) -> bool:
        """Whether the page holds some of the first tokens."""
        begin = index * self.page_size
        return begin < sequence.kv_start + self.first and begin + self.page_size > sequence.kv_start

    def held_from(self, sequence: Sequence) -> int:
        """The first position from which on all tokens are held."""
        return self.trimmed[sequence.row] * self.page_size

    def holds_window(self, sequence: Sequence, length: int, trimmed: int) -> bool:
        """Whether the next token would see no page before `trimmed`, nor be stored in one, if the sequence had `length`
        tokens."""
        if self.reach is None:
            return True
        begin = min(trimmed, count_pages(length, self.page_size)) * self.page_size
        return max(sequence.kv_start, length - self.reach) >= begin

    def trim(self, sequence: Sequence, journal: Journal) -> None:
        """Release the pages that no token after the sequence's end reads any more, nor after `slack` tokens less."""
        if self.reach is None:
            return
        row, begin = sequence.row, self.trimmed[sequence.row]
        end = min(max(0, sequence.length - self.reach - self.slack), sequence.length) // self.page_size
        if end <= begin:
            return
        for index in range(begin, end):
            if not self.is_pinned(sequence, index):
                self._drop(row, index, journal)
        self._set_trimmed(row, end, journal)

    def make_writable(self, sequence: Sequence, copies: list[tuple[int, int]], journal: Journal) -> None:
        """Give the sequence a last page of its own where it shares a partly filled one: a copy (old, new) to make."""
        index, used = divmod(sequence.length, self.page_size)
        page = int(self.pages[sequence.row, index]) if used else -1
        if page < 0 or self.pool.users[page] == 1:
            return
        copy = self._take(journal)
        self._put(sequence.row, index, copy, journal)
        self.pool.release(page, journal)
        copies.append((page, copy))

    def extend(self, sequence: Sequence, count: int, journal: Journal) -> None:
        """Take pages for `count` more tokens; none for padding, and none for a page whose first tokens are gone."""
        begin = max(count_pages(sequence.length, self.page_size), sequence.kv_start // self.page_size)
        for index in range(begin, count_pages(sequence.length + count, self.page_size)):
            if self.reach == -1 and not self.is_pinned(sequence, index):
                continue
            self._put(sequence.row, index, self._take(journal), journal)

    def fork(self, source: Sequence, target: Sequence) -> None:
        """The target names the same pages."""
        self.pages[target.row] = self.pages[source.row]
        self.trimmed[target.row] = self.trimmed[source.row]
        for page in self.held(target).tolist():
            self.pool.share(page)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Release the pages from token `length` on."""
        keep = count_pages(length, self.page_size)
        for index in range(keep, count_pages(sequence.length, self.page_size)):
            self._drop(sequence.row, index, [])
        self.trimmed[sequence.row] = min(self.trimmed[sequence.row], keep)

    def can_hold(self, sequence: Sequence, named: np.ndarray, trimmed: int) -> bool:
        """Whether a sequence may name such pages (width), -1 none, with those before `trimmed` released."""
        used = count_pages(sequence.length, self.page_size)
        if not 0 <= trimmed <= (0 if self.reach is None else used) or (named[used:] >= 0).any():
            return False
        is_kept = [self.is_pinned(sequence, index) or (index >= trimmed and self.reach != -1) for index in range(used)]
        padding = sequence.kv_start // self.page_size
        return not (named[:used] < 0)[padding:][is_kept[padding:]].any()

    def adopt(self, sequences: list[Sequence], named: np.ndarray, trimmed: list[int], journal: Journal) -> np.ndarray:
        """Take pages for new sequences whose tables name (sequences, pages) of them by number, -1 none; those pages."""
        pages = np.array([self._take(journal) for _ in range(named.max(initial=-1) + 1)], dtype=np.int64)
        for sequence, names, begin in zip(sequences, named.tolist(), trimmed, strict=True):
            self._set_trimmed(sequence.row, begin, journal)
            for index, name in enumerate(names):
                if name >= 0:
                    self._put(sequence.row, index, int(pages[name]), journal)
        for page, users in zip(pages.tolist(), np.bincount(named[named >= 0], minlength=len(pages)), strict=True):
            journal.append((self.pool.users.__setitem__, (page, 1)))
            self.pool.users[page] = int(users)
        return pages

    def held(self, sequence: Sequence) -> np.ndarray:
        """The pages of a sequence, in order."""
        row = self.pages[sequence.row, : count_pages(sequence.length, self.page_size)]
        return row[row >= 0]
