"""Sequences of a cache in a safetensors file, and back.

The file holds the pages that the sequences use, once each, and their tables. Its metadata is the header: format,
version, kind of cache, everything that the bytes of a page depend on, and a SHA-256 over header and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flashq.caches.index import to_device
from flashq.caches.pages import CacheFullError, Sequence, all_or_nothing, count_named, count_pages

if TYPE_CHECKING:
    from flashq.caches.base import PagedCache

FORMAT, VERSION = "flashq cache", "1"


class CacheFileError(ValueError):
    """A file that is no cache, is damaged, or does not fit the cache that should load it."""


def _safetensors(method: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"flashq.{method}: expected the package safetensors, got none: pip install safetensors"
        ) from error
    return safetensors


def header_of(cache: PagedCache) -> dict[str, str]:
    """What a file has to agree on with a cache, as text."""
    return {"format": FORMAT, "version": VERSION, "cache": type(cache).__name__} | {
        name: json.dumps(value) for name, value in cache._layout().items()
    }


def _digest(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(cache: PagedCache, path: str | os.PathLike[str], states: list[Sequence]) -> None:
    """Write sequences to a file; one that is there, also behind a link, is replaced when the new one is complete."""
    safetensors = _safetensors(f"{type(cache).__name__}.save")
    cache._trim(states, [])
    rows = [state.row for state in states]
    tensors = {
        "length": torch.tensor([state.length for state in states], dtype=torch.int64),
        "kv_start": torch.tensor([state.kv_start for state in states], dtype=torch.int64),
    }
    longest = max((state.length for state in states), default=0)
    for i, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
        named = table.pages[rows, : count_pages(longest, table.page_size)]
        pages = np.unique(named[named >= 0])
        tensors[f"{i}.table"] = torch.from_numpy(
            np.where(named < 0, -1, np.searchsorted(pages, named)).astype(np.int32)
        )
        tensors[f"{i}.trimmed"] = torch.tensor([table.trimmed[row] for row in rows], dtype=torch.int64)
        index = torch.from_numpy(pages.astype(np.int64)).to(cache.device)
        for name, plane in planes.items():
            tensors[f"{i}.{name}"] = plane[:, index].cpu()
    header = header_of(cache)
    header["sha256"] = _digest(header, tensors)
    target = Path(path).resolve()
    temporary = target.with_name(f".flashq-{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, temporary, metadata=header)  # makes a file for nobody else to read
        temporary.chmod(mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(cache: PagedCache, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file that fits the cache and is what was written."""
    method = f"{type(cache).__name__}.load"
    safetensors = _safetensors(method)

    def refuse(what: str, expected: str, got: str) -> None:
        raise CacheFileError(f"flashq.{method}: {os.fspath(path)!r}: {what}: expected {expected}, got {got}")

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            refuse("file", "a regular file", "something else")
        # Not by name: safetensors opens a file twice, and another may have taken its place in between.
        with safetensors.safe_open(f"/proc/self/fd/{descriptor}", framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            for name, value in header_of(cache).items():
                if header.get(name) != value:
                    refuse(name, value, header.get(name, "none"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stated = header.pop("sha256", "none")
        digest = _digest(header, tensors)
    except (CacheFileError, OSError, MemoryError):
        raise
    except Exception as error:
        refuse("file", "a safetensors file", f"a damaged one ({error})")
    finally:
        os.close(descriptor)
    if digest != stated:
        refuse("sha256", f"{stated}, as the file says", f"{digest}: it is damaged")
    if (wrong := _wrong_tensor(cache, tensors)) is not None:
        refuse("tensors", "those of a cache", f"others: {wrong} is missing or does not fit")
    return tensors


def _wrong_tensor(cache: PagedCache, tensors: dict[str, Tensor]) -> str | None:
    """The first tensor that is not what a cache would have written: a checksum does not say who wrote a file.

    Checked are names, dtypes, shapes, and all that the cache's bookkeeping relies on.
    """

    def differs(name: str, dtype: torch.dtype, *shape: int) -> bool:
        return name not in tensors or tensors[name].dtype != dtype or tensors[name].shape != shape

    count = tensors["length"].numel() if "length" in tensors else 0
    for name in ("length", "kv_start"):
        if differs(name, torch.int64, count) or (count and int(tensors[name].min()) < 0):
            return name
    lengths, starts = tensors["length"].tolist(), tensors["kv_start"].tolist()
    states = [Sequence(0, *values) for values in zip(lengths, starts, strict=True)]
    names = {"length", "kv_start"}
    for i, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
        width = count_pages(max(lengths, default=0), table.page_size)
        names |= {f"{i}.table", f"{i}.trimmed", *(f"{i}.{name}" for name in planes)}
        if differs(f"{i}.trimmed", torch.int64, count):
            return f"{i}.trimmed"
        if differs(f"{i}.table", torch.int32, count, width):
            return f"{i}.table"
        named, trimmed = tensors[f"{i}.table"].numpy(), tensors[f"{i}.trimmed"].tolist()
        pages = count_named(named)
        if pages is None or not all(map(table.can_hold, states, named, trimmed)):
            return f"{i}.table"
        if i != cache._exact_table and not all(map(table.holds_window, states, lengths, trimmed)):
            return f"{i}.trimmed"
        for name, plane in planes.items():
            if differs(f"{i}.{name}", plane.dtype, plane.shape[0], pages, *plane.shape[2:]):
                return f"{i}.{name}"
    return min(set(tensors) - names, default=None)


def load(cache: PagedCache, path: str | os.PathLike[str]) -> list[int]:
    """Add a file's sequences to the cache, all or none; the new ones, in the order in which they were saved."""
    tensors = _read(cache, path)
    lengths, starts = tensors["length"].tolist(), tensors["kv_start"].tolist()
    for name, value, most in (
        ("max_length", max(lengths, default=0), cache.max_length),
        ("max_sequences", len(lengths), len(cache._free_rows)),
    ):
        if value > most:
            raise CacheFullError(f"flashq.{type(cache).__name__}.load: {name}: expected at most {most}, got {value}")
    rows = cache._free_rows[::-1][: len(lengths)]
    states = [Sequence(*values) for values in zip(rows, lengths, starts, strict=True)]
    with all_or_nothing() as journal:
        for i, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
            named, trimmed = tensors[f"{i}.table"].numpy(), tensors[f"{i}.trimmed"].tolist()
            pages = table.adopt(states, named, trimmed, journal)
            index = to_device(pages, cache.device)
            for name, plane in planes.items():
                plane[:, index] = tensors[f"{i}.{name}"].to(cache.device)
    cache._generation += 1  # a step of before may name pages that were free
    return [cache._admit(state) for state in states]
