"""Caches in files: what comes back is what was there, and nothing else is taken."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable
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
        with pytest.raises(ValueError, match=r"truncate: lengths: expected at least .* released"):
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


def forge(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Change the file's tensors (None: leave one out), with a checksum that is right."""
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header.pop("sha256")
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(tensors, path, metadata=header | {"sha256": _digest(header, tensors)})


FORGERIES: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "no lengths": lambda t: {"length": None},
    "no plane": lambda t: {"0.k_codes": None},
    "one tensor more": lambda t: {"more": torch.zeros(1)},
    "longer": lambda t: {"length": t["length"] + 64},
    "shorter": lambda t: {"length": t["length"] - 40},
    "as long as int64 goes": lambda t: {"length": torch.full_like(t["length"], 2**63 - 1)},
    "negative lengths": lambda t: {"length": -t["length"]},
    "lengths of another dtype": lambda t: {"length": t["length"].float()},
    "lengths that are no numbers": lambda t: {"length": t["length"] * float("nan")},
    "complex lengths": lambda t: {"length": t["length"].to(torch.complex64)},
    "lengths of another shape": lambda t: {"length": t["length"][None]},
    "one length": lambda t: {"length": t["length"][0]},
    "negative padding": lambda t: {"kv_start": t["kv_start"] - 30},
    "less padding": lambda t: {"kv_start": torch.zeros_like(t["kv_start"])},
    "fewer paddings": lambda t: {"kv_start": t["kv_start"][1:].clone()},
    "a table of int64": lambda t: {"0.table": t["0.table"].long()},
    "a complex table": lambda t: {"0.table": t["0.table"].to(torch.complex64)},
    "page 0 unnamed": lambda t: {"0.table": t["0.table"] + 1},
    "a number left out": lambda t: {"0.table": torch.where(t["0.table"] == t["0.table"].max(), -1, t["0.table"])},
    "a table of -2": lambda t: {"0.table": torch.where(t["0.table"] < 0, -2, t["0.table"])},
    "no page where tokens are": lambda t: {"0.table": torch.full_like(t["0.table"], -1)},
    "one page for all": lambda t: {
        "0.table": t["0.table"].clamp(max=0),
        **{name: x[:, :1].clone() for name, x in t.items() if name.startswith("0.") and x.dim() > 2},
    },
    "a page at two places": lambda t: {"0.table": t["0.table"].flip(1)},
    "a page past the end": lambda t: {"0.table": torch.where(t["0.table"] < 0, t["0.table"].max(), t["0.table"])},
    "a huge page number": lambda t: {"0.table": torch.where(t["0.table"] == 0, 2**31 - 1, t["0.table"])},
    "pages released in full attention": lambda t: {"0.trimmed": t["0.trimmed"] + 1},
    "more released than there are": lambda t: {"1.trimmed": t["1.trimmed"] + 1000},
    "negative releases": lambda t: {"1.trimmed": t["1.trimmed"] - 100},
    "releases in the window": lambda t: {"1.trimmed": (t["length"] // 16).clone()},
    "fewer pages": lambda t: {"0.k_codes": t["0.k_codes"][:, 1:].clone()},
    "codes of another dtype": lambda t: {"0.k_codes": t["0.k_codes"].view(torch.int8)},
    "norms of another dtype": lambda t: {"0.k_norms": t["0.k_norms"].view(torch.bfloat16)},
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_file_is_refused(what: str, written: Path) -> None:
    """With a checksum that is right, of tensors that are not what a cache holds."""
    with safe_open(written, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    forge(written, FORGERIES[what](tensors))
    refused(make("tbq4"), written, "tensors: expected those of a cache, got others: .* is missing or does not fit")


def test_a_file_that_is_saved_again_is_the_same(written: Path) -> None:
    forge(written, {})
    cache = make("tbq4")
    assert [cache.length(sequence) for sequence in cache.load(written)] == [193, 48, 191]


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


def test_links_are_followed_and_modes_kept_to_the_umask(tmp_path: Path) -> None:
    both = pair("16bit")
    fill(both)
    (tmp_path / "runs").mkdir()
    target, link = tmp_path / "runs" / "first", tmp_path / "latest"
    link.symlink_to("runs/first")
    with pytest.raises(FileNotFoundError, match="latest"):
        both.cache.load(link)
    umask = os.umask(0o027)
    try:
        both.cache.save(link)
    finally:
        os.umask(umask)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [path.name for path in target.parent.iterdir()] == ["first"]
    assert len(make("16bit").load(link)) == 3


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    cache = make("tbq4")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "pipe", Path("/dev/zero")):
        refused(cache, path, "file: expected a regular file, got something else")
    with pytest.raises(OSError, match="folder"):
        cache.save(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "missing" / "cache")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Two writers and a reader at one path: what is read is one of the files, whole."""
    path, lengths = tmp_path / "cache", {}
    caches = []
    for kind in ((20,), (20, 70)):
        cache = make("tbq4")
        for count in kind:
            _, k, v = random_inputs(cache, count, count)
            step = cache.extend(cache.alloc(), count)
            for layer in range(2):
                step.append(layer, k[layer], v[layer])
        caches.append(cache)
        lengths[len(kind)] = list(kind)
    caches[0].save(path)
    done = threading.Event()

    def write(cache: PagedCache) -> None:
        while not done.is_set():
            cache.save(path)

    writers = [threading.Thread(target=write, args=(cache,)) for cache in caches]
    for writer in writers:
        writer.start()
    try:
        for _ in range(40):
            reader = make("tbq4")
            loaded = reader.load(path)
            assert [reader.length(sequence) for sequence in loaded] == lengths[len(loaded)]
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_a_load_that_memory_is_not_enough_for_changes_nothing(written: Path) -> None:
    class NoRoom(dict):
        def items(self) -> Any:
            raise torch.OutOfMemoryError

    cache = make("tbq4")
    cache._planes[-1] = NoRoom(cache._planes[-1])
    before = snapshot(cache)
    with pytest.raises(torch.OutOfMemoryError):
        cache.load(written)
    assert snapshot(cache) == before
    check_pages(cache)
