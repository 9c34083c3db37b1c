"""Room for more pages and sequences in a cache that is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashq.caches.arguments import MOST_TOKENS
from flashq.caches.pages import count_pages

if TYPE_CHECKING:
    from flashq.caches.base import PagedCache


def reserve(cache: PagedCache, num_pages: int, max_sequences: int, max_length: int) -> None:
    """Make room for so much, where there is not; pages keep their numbers and sequences their rows."""
    num_pages = max(cache.num_pages, num_pages)
    rows = max(cache.max_sequences, max_sequences)
    max_length = max(cache.max_length, max_length, min(num_pages * cache.page_size, MOST_TOKENS))
    # First all that memory may not be enough for, then what cannot fail.
    sizes, grown_planes, grown_tables = [], [], []
    for number, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
        held = table.pool.size
        pages = max(held, cache._pool_size(number, num_pages, rows))
        grown = dict(planes)
        for name, plane in planes.items() if pages > held else ():
            grown[name] = cache._zeros(plane.shape[0], pages, *plane.shape[2:], dtype=plane.dtype)
            grown[name][:, :held] = plane
        sizes.append(pages)
        grown_planes.append(grown)
        grown_tables.append(table.grown(rows, count_pages(max_length, table.page_size)))
    index = cache._new_index(rows, max_length)
    for table, pages, entries in zip(cache._tables, sizes, grown_tables, strict=True):
        table.resize(pages, entries)
    cache._use(grown_planes, index)
    cache._free_rows[:0] = range(rows - 1, cache.max_sequences - 1, -1)
    cache.num_pages, cache.max_sequences, cache.max_length = num_pages, rows, max_length
    cache._generation += 1
