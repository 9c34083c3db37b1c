"""Caches of a whole model: `PagedKVCache` in 16 bits, `TBQ4Cache` in 4.  `PagedCache` says how a model uses one."""

from flashq.caches.base import PagedCache
from flashq.caches.files import CacheFileError
from flashq.caches.kinds import PagedKVCache, TBQ4Cache
from flashq.caches.pages import CacheFullError
from flashq.caches.step import Step

__all__ = ["CacheFileError", "CacheFullError", "PagedCache", "PagedKVCache", "Step", "TBQ4Cache"]
