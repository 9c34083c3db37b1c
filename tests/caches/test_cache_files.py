"""Caches in files: what comes back is what was there, and nothing else is taken."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_model import Pair, check_pages, random_inputs, snapshot
from test_cache_steps import make, pair
from torch import Tensor

import flashq
from flashq.caches import CacheFileError, PagedCache
from flashq.caches.files import _digest

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import save_file


def fill(both: Pair) -> list[int]:
    """Three sequences: shared pages, a copied one, padding, released and truncated pages."""
    a, b = both.alloc(), both.alloc(kv_start=20)
    both.extend([a, b], [190, 60])
    both.extend([a], [1])
    c = both.fork(a)
    both.truncate(b, 45)
    both.extend([a, b], [2, 3])
    return [c, b, a]


def next_outputs(cache: PagedCache, sequences: list[int]) -> list[Tensor]:
    q, k, v = random_inputs(cache, len(sequences), 77)
    step = cache.extend(sequences)
    return [step.attend(layer, q[layer], k[layer], v[layer])[0] for layer in range(cache.num_layers)]


@pytest.mark.parametrize("kind", ["16bit", "tbq4", "tbq4 plain"])
def test_round_trip(kind: str, tmp_path: Path) -> None:
    both = pair(kind)
    saved = fill(both)
    path = tmp_path / "cache.safetensors"
    both.cache.save(path, saved)
    other = make(kind, num_pages=37, max_sequences=6, max_length=300)
    old = other.alloc()
    next_outputs(other, [old])
    loaded = other.load(path)
    assert [other.length(s) for s in loaded] == [both.cache.length(s) for s in saved]
    assert other.sequences == [old, *loaded]
    check_pages(other)
    in_use = {name: used for name, (used, _) in both.cache.pages_in_use.items()}
    assert {name: used - 1 for name, (used, _) in other.pages_in_use.items()} == in_use  # shared pages stay shared
    assert all(map(torch.equal, next_outputs(other, loaded), next_outputs(both.cache, saved)))
    for cache, sequence in ((other, loaded[0]), (both.cache, saved[0])):
        with pytest.raises(ValueError, match=r"truncate: length: expected at least .* released"):
            cache.truncate(sequence, 100)
    other.truncate(loaded[0], 180)
    both.cache.truncate(saved[0], 180)
    assert all(map(torch.equal, next_outputs(other, loaded), next_outputs(both.cache, saved)))


def test_a_part_nothing_and_a_file_that_is_replaced(tmp_path: Path) -> None:
    both = pair("tbq4")
    saved = fill(both)
    path = tmp_path / "cache.safetensors"
    both.cache.save(path)
    whole = path.stat().st_size
    both.cache.save(path, saved[1:2])
    assert path.stat().st_size < whole / 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    other = make("tbq4")
    assert [other.length(s) for s in other.load(path)] == [48]
    make("tbq4").save(path)
    assert other.load(path) == []
    with pytest.raises(ValueError, match="save: sequence: expected one of the cache's sequences, got 99"):
        both.cache.save(path, [99])
    with pytest.raises(ValueError, match="save: sequences: expected each once"):
        both.cache.save(path, [saved[0], saved[0]])
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "none")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    both = pair("tbq4")
    fill(both)
    both.cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refused(cache: PagedCache, path: Path, message: str, error: type[Exception] = CacheFileError) -> None:
    before = snapshot(cache)
    with pytest.raises(error, match=message) as caught:
        cache.load(path)
    if error is CacheFileError:
        assert str(path) in str(caught.value)
    assert snapshot(cache) == before


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("16bit", {}, "cache: expected PagedKVCache, got TBQ4Cache"),
        ("tbq4", {"page_size": 32}, "page_size: expected 32, got 16"),
        ("tbq4", {"window_left": [-1, 71]}, r"window_left: expected \[-1, 71\], got \[-1, 70\]"),
        ("tbq4", {"window_left": [-1]}, "num_layers: expected 1, got 2"),
        ("tbq4", {"dtype": torch.float16}, "dtype: expected .*float16.*, got .*float32"),
        ("tbq4 offsets", {}, "exact_first: expected 0, got 4"),
        ("tbq4 plain", {}, "page_offsets: expected false, got true"),
    ],
)
def test_another_layout_is_refused(kind: str, options: dict[str, Any], message: str, written: Path) -> None:
    refused(make(kind, **options), written, message)


def test_another_head_dim_is_refused(written: Path) -> None:
    cache = flashq.TBQ4Cache(2, 2, 128, num_pages=30, page_size=16, window_left=[-1, 70], dtype=torch.float32)
    refused(cache, written, "head_dim: expected 128, got 64")


@pytest.mark.parametrize("options", [{"num_pages": 8, "max_length": 400}, {"max_sequences": 2}, {"max_length": 100}])
def test_a_cache_without_room_is_left_as_it_was(options: dict[str, Any], written: Path) -> None:
    refused(make("tbq4", **options), written, "expected .*, got", flashq.CacheFullError)


def rewrite(path: Path, **changes: str) -> None:
    with safe_open(path, framework="pt") as file:
        header = file.metadata() | changes
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=header)


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", "2"), ("fingerprint", '"dbe9ab17e320d84e"'), ("block", "128"), ("format", "cache"), ("sha256", "0")],
)
def test_another_version_or_code_table_is_refused(name: str, value: str, written: Path) -> None:
    rewrite(written, **{name: value})
    refused(make("tbq4"), written, f"{name}: expected")


def test_a_changed_tensor_or_name_is_refused(written: Path) -> None:
    original = written.read_bytes()
    with safe_open(written, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in tensors:
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[name].view(-1)[:1] += 1
        save_file(changed, written, metadata=header)
        refused(make("tbq4"), written, "sha256: expected .* damaged")
    for changed in (tensors | {"more": torch.zeros(1)}, {n: t for n, t in tensors.items() if n != "0.table"}):
        save_file(changed, written, metadata=header)
        refused(make("tbq4"), written, "sha256: expected .* damaged")
    written.write_bytes(original)
    assert len(make("tbq4").load(written)) == 3


def test_a_forged_file_is_refused(written: Path) -> None:
    """With a checksum that is right, of tensors that are not."""
    with safe_open(written, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header.pop("sha256")
    forgeries = [{"0.table": tensors["0.table"] + 1}, {"kv_start": tensors["kv_start"] - 30}, {"more": torch.zeros(1)}]
    forgeries += [{"length": tensors["length"] + 64}, {"length": tensors["length"].float()}]
    forgeries += [{"0.k_codes": tensors["0.k_codes"][:, 1:].clone()}]
    for changes in forgeries:
        changed = tensors | changes
        save_file(changed, written, metadata=header | {"sha256": _digest(header, changed)})
        refused(make("tbq4"), written, "tensors: expected those of a cache")
    changed = {name: tensor for name, tensor in tensors.items() if name != "length"}
    save_file(changed, written, metadata=header | {"sha256": _digest(header, changed)})
    refused(make("tbq4"), written, "tensors: expected those of a cache")


def test_damage_of_any_kind_is_refused(written: Path) -> None:
    """Cut at many places, and bits turned in the header and in the data: never a wrong cache, never another error."""
    original = written.read_bytes()
    head = 8 + struct.unpack("<Q", original[:8])[0]
    json.loads(original[8:head])
    for end in (0, 3, 8, 9, head - 1, head, head + 1, len(original) // 2, len(original) - 1):
        written.write_bytes(original[:end])
        refused(make("tbq4"), written, "file: expected a safetensors file")
    written.write_bytes(original + b"\0")
    refused(make("tbq4"), written, "file: expected a safetensors file")
    for at in (*range(0, head, 29), *range(head, len(original), len(original) // 60)):
        for bit in (0, 5):
            damaged = bytearray(original)
            damaged[at] ^= 1 << bit
            written.write_bytes(damaged)
            refused(make("tbq4"), written, "expected")
    written.write_bytes(b"no cache at all")
    refused(make("tbq4"), written, "file: expected a safetensors file")
    save_file({"x": torch.zeros(3)}, written)
    refused(make("tbq4"), written, "format: expected flashq cache, got none")


def test_without_safetensors_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (make("tbq4").save, make("tbq4").load):
        with pytest.raises(ImportError, match="expected the package safetensors, got none: pip install safetensors"):
            call(tmp_path / "x")
