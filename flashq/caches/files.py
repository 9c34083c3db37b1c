"""Sequences of a cache in a safetensors file, and back.

The file holds the pages that the sequences use, once each, and their tables. Its metadata is the header: format,
version, kind of cache, everything that the bytes of a page depend on, and a SHA-256 over header and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flashq.caches.pages import CacheFullError, Sequence, all_or_nothing, count_pages

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


def save(cache: PagedCache, path: str | os.PathLike[str], handles: SequenceOf[int]) -> None:
    """Write sequences to a file; one that is there is replaced when the new one is complete."""
    safetensors = _safetensors(f"{type(cache).__name__}.save")
    states = [cache._find("save", handle) for handle in handles]
    if len(set(handles)) != len(handles):
        cache._refuse("save", "sequences", "each once", list(handles))
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
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(descriptor)
    try:
        safetensors.torch.save_file(tensors, temporary, metadata=header)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(cache: PagedCache, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file that fits the cache and is what was written."""
    method = f"{type(cache).__name__}.load"
    safetensors = _safetensors(method)

    def refuse(what: str, expected: str, got: str) -> None:
        raise CacheFileError(f"flashq.{method}: {os.fspath(path)!r}: {what}: expected {expected}, got {got}")

    header: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") == FORMAT:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:
        refuse("file", "a safetensors file", f"a damaged one ({error})")
    for name, value in header_of(cache).items():
        if header.get(name) != value:
            refuse(name, value, header.get(name, "none"))
    stated = header.pop("sha256", "none")
    if (digest := _digest(header, tensors)) != stated:
        refuse("sha256", f"{stated}, as the file says", f"{digest}: it is damaged")
    if not _is_complete(cache, tensors):
        refuse("tensors", "those of a cache", "others")
    return tensors


def _is_complete(cache: PagedCache, tensors: dict[str, Tensor]) -> bool:
    """Whether all tensors are there and fit each other: a checksum does not say who wrote a file."""
    if "length" not in tensors:
        return False
    lengths = tensors["length"]
    count, longest = lengths.numel(), int(lengths.max()) if lengths.numel() else 0
    expected = {"length": ((count,), torch.int64), "kv_start": ((count,), torch.int64)}
    for i, (table, planes) in enumerate(zip(cache._tables, cache._planes, strict=True)):
        width = count_pages(longest, table.page_size)
        expected[f"{i}.table"] = ((count, width), torch.int32)
        expected[f"{i}.trimmed"] = ((count,), torch.int64)
        named = tensors.get(f"{i}.table", lengths)
        pages = int(named.max()) + 1 if named.numel() else 0
        for name, plane in planes.items():
            expected[f"{i}.{name}"] = ((plane.shape[0], pages, *plane.shape[2:]), plane.dtype)
    if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != expected:
        return False
    numbers = {name: t for name, t in tensors.items() if t.dtype in (torch.int32, torch.int64) and t.numel()}
    return all(int(t.min()) >= (-1 if name.endswith("table") else 0) for name, t in numbers.items())


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
            index = cache._to_device(pages)
            for name, plane in planes.items():
                plane[:, index] = tensors[f"{i}.{name}"].to(cache.device)
    return [cache._admit(state) for state in states]
