"""Room for more pages and sequences in a cache that is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashq.caches.pages import count_pages

if TYPE_CHECKING:
    from flashq.caches.base import PagedCache


def reserve(cache: PagedCache, num_pages: int, max_sequences: int, max_length: int) -> None:
    """Make room for so much, where there is not; pages keep their numbers and sequences their rows."""
    old = cache.max_sequences
    cache.max_sequences = max(old, max_sequences)
    cache._free_rows[:0] = range(cache.max_sequences - 1, old - 1, -1)
    cache.num_pages = max(cache.num_pages, num_pages)
    cache.max_length = max(cache.max_length, max_length, cache.num_pages * cache.page_size)
    for index, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
        pages = cache.num_pages
        if table.reach is not None:  # a window, or exact tokens: what all sequences together can need
            pages = cache._pages_of(table.reach + 1, table.page_size, table.first)
            if index != cache._exact_table:
                pages = min(pages, cache.num_pages)
        held = len(table.pool.users)
        pages = max(pages, held)
        table.resize(pages, cache.max_sequences, count_pages(cache.max_length, table.page_size))
        for name, plane in planes.items() if pages > held else ():
            planes[name] = cache._zeros(plane.shape[0], pages, *plane.shape[2:], dtype=plane.dtype)
            planes[name][:, :held] = plane
    cache._allocate()
    cache._generation += 1
