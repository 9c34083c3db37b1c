"""What a cache is asked wrongly, what it says of itself, and the keys that need its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accuracy import relative_l2
from cache_model import random_inputs, snapshot
from test_cache_steps import make

import flashq
from flashq import reference
from flashq.cli.capture import load_capture


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads: expected at least 1, got 0"),
        ({"num_pages": -1}, "num_pages: expected at least 0, got -1"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"max_sequences": 0}, "max_sequences: expected at least 1, got 0"),
        ({"slack": -1}, "slack: expected at least 0, got -1"),
        ({"max_chunk": 0}, "max_chunk: expected at least 1, got 0"),
        ({"dtype": torch.float64}, "dtype: expected torch.float16, .*, got torch.float64"),
        ({"window_left": -2}, r"window_left: expected -1 to 2147483647.*, got \[-2, -2\]"),
        ({"window_left": [-1]}, r"window_left: expected .* one for all or each of 2 layers, got \[-1\]"),
        ({"head_dim": 80}, "head_dim: expected 64, 128 or 256, got 80"),
        ({"exact_first": -1}, "exact_first: expected at least 0, got -1"),
        ({"exact_last": -4}, "exact_last: expected at least 0, got -4"),
        ({"exact_pages": -1}, "exact_pages: expected at least 0, got -1"),
        ({"window_pages": -1}, "window_pages: expected at least 0, got -1"),
        ({"max_length": -1}, "max_length: expected at least 0, got -1"),
        ({"max_length": 2**31}, "max_length: expected at most 2147483647, got 2147483648"),
        ({"num_pages": 2.5}, "num_pages: expected an integer, got 2.5"),
        ({"slack": None}, "slack: expected an integer, got None"),
        ({"max_sequences": "3"}, "max_sequences: expected an integer, got '3'"),
        ({"window_left": [1.5, 2]}, r"window_left: expected an integer or a sequence of integers, got \[1.5, 2\]"),
        ({"window_left": 2**31}, "window_left: expected -1 to 2147483647, one for all"),
        ({"device": "nope"}, "device: expected one that PyTorch knows, got 'nope'"),
    ],
)
def test_construction(options: dict[str, Any], message: str) -> None:
    arguments = {"num_layers": 2, "kv_heads": 1, "head_dim": 64, "num_pages": 2} | options
    with pytest.raises(ValueError, match=f"^flashq.TBQ4Cache: {message}"):
        flashq.TBQ4Cache(**arguments)


def test_head_dims_of_16_bits() -> None:
    assert flashq.PagedKVCache(1, 1, 80, num_pages=1).head_dim == 80
    for head_dim in (84, 264, 0):
        with pytest.raises(
            ValueError, match=f"flashq.PagedKVCache: head_dim: expected a multiple of 8.*, got {head_dim}"
        ):
            flashq.PagedKVCache(1, 1, head_dim, num_pages=1)


def test_calls_that_do_not_fit_change_nothing() -> None:
    cache = make("tbq4")
    a, b = cache.alloc(), cache.alloc()
    step = cache.extend([a, b], [20, 3])
    q, k, v = random_inputs(cache, 23, 0)
    before = snapshot(cache)
    for call, message in (
        (lambda: cache.extend([a, 99]), "extend: sequence: expected one of the cache's sequences, got 99"),
        (lambda: cache.extend([a, a]), r"extend: sequences: expected each once, got \[0, 0\]"),
        (lambda: cache.extend([a, b], [1]), r"extend: counts: expected one .* each of 2 sequences, got \[1\]"),
        (lambda: cache.extend([a], [-1]), r"extend: counts: .*got \[-1\]"),
        (lambda: cache.alloc(-1), "alloc: kv_start: expected 0 to 2147483647, got -1"),
        (lambda: cache.alloc(2**31), "alloc: kv_start: expected 0 to 2147483647, got 2147483648"),
        (lambda: cache.pad(b, 2**31), "pad: kv_start: expected at least the present 0, at most 2147483647, got"),
        (lambda: cache.fork(7), "fork: sequence: .*got 7"),
        (lambda: cache.free(7), "free: sequence: .*got 7"),
        (lambda: cache.length(7), "length: sequence: .*got 7"),
        (lambda: cache.truncate(a, 21), "truncate: lengths: expected 0 to 20, got 21"),
        (lambda: cache.truncate(a, -1), r"truncate: lengths: expected one of at least 0 .*, got \[-1\]"),
        (lambda: cache.truncate([a, b], [2, 4]), "truncate: lengths: expected 0 to 3, got 4"),
        (lambda: cache.truncate([a, a], 2), r"truncate: sequences: expected each once, got \[0, 0\]"),
        (lambda: cache.select([a, b], [2]), r"select: indices: expected a list of 0 to 1, got \[2\]"),
        (lambda: cache.select([a, b], [-1]), r"select: indices: expected a list of 0 to 1, got \[-1\]"),
        (lambda: cache.select([a, b], [0.0, 0.5]), r"select: indices: expected an integer or .*, got \[0.0, 0.5\]"),
        (lambda: cache.select([a, a], [0]), r"select: sequences: expected each once, got \[0, 0\]"),
        (lambda: cache.alloc(1.5), "alloc: kv_start: expected an integer, got 1.5"),
        (lambda: cache.pad(b, None), "pad: kv_start: expected at least the present 0, at most 2147483647, got None"),
        (lambda: cache.length([a]), r"length: sequence: expected one of the cache's sequences, got \[0\]"),
        (lambda: cache.extend(None), "extend: sequences: expected an integer or a sequence of integers, got None"),
        (lambda: cache.extend(a, 2.0), "extend: counts: expected an integer or a sequence of integers, got 2.0"),
        (lambda: cache.extend(a, [2.5]), r"extend: counts: expected an integer or .*, got \[2.5\]"),
        (lambda: cache.lookup([a, b], 2**30), "lookup: counts: expected at most 2147483647 tokens .*, got 2147483648"),
        (lambda: cache.reserve(num_pages=99.5), "reserve: num_pages: expected an integer, got 99.5"),
        (lambda: cache.reserve(max_length=2**31), "reserve: max_length: expected at most 2147483647, got 2147483648"),
        (lambda: step.attend(2, q[0]), "attend: layer: expected 0 to 1, got 2"),
        (lambda: step.append(-1, k[0], v[0]), "append: layer: expected 0 to 1, got -1"),
        (lambda: step.attend(0, q[0], k[0]), "attend: k, v: expected both or none, got one"),
        (lambda: step.attend(0, q[0, :5]), r"attend: q: expected shape \(23, Hq, 64\), got shape \(5, 4, 64\)"),
        (lambda: step.append(0, k[0, :5], v[0]), r"append: k: expected shape \(23, 2, 64\), got shape \(5, 2, 64\)"),
        (lambda: step.append(0, k[0], v[0, :, :1]), r"append: v: expected shape .*, got shape \(23, 1, 64\)"),
        (lambda: step.append(0, k[0].half(), v[0]), "append: k: expected torch.float32, .*, got torch.float16"),
        (lambda: step.append(0, k[0], None), "append: v: expected a dense tensor, got a NoneType"),
        (lambda: step.attend(0, None, k[0], v[0]), "attend: q: expected a dense tensor, got a NoneType"),
        (lambda: step.attend(0.5, q[0]), "attend: layer: expected an integer, got 0.5"),
    ):
        with pytest.raises(ValueError, match=f"^flashq.TBQ4Cache.{message}"):
            call()
        assert snapshot(cache) == before
    with pytest.raises(flashq.CacheFullError, match="select: max_sequences: expected at most 5, got 6"):
        cache.select([a, b], [0, 0, 0, 0, 1, 1])
    assert snapshot(cache) == before
    step.attend(0, q[0], k[0], v[0])


def test_numbers_of_numpy_and_tensors(tmp_path: Path) -> None:
    """What beam search has at hand is a tensor: its elements are equal to ints, but no keys of a dict."""
    sizes = {"num_pages": np.int64(40), "page_size": np.int32(16), "slack": torch.tensor(16)}
    cache, twin = make("tbq4", **sizes), make("tbq4")
    a, b = cache.alloc(np.int64(3)), cache.alloc(torch.tensor(0))
    cache.extend(torch.tensor([a, b]), np.array([5, 7]))
    cache.extend(np.int64(a), torch.tensor(2))
    assert [cache.length(torch.tensor(a)), cache.length(np.int64(b))] == [7, 7]
    kept, fork = cache.select([a, b], torch.tensor([1, 1]))
    assert cache.sequences == [kept, fork] == [b, fork]
    cache.truncate(b, torch.tensor(6))
    pytest.importorskip("safetensors")
    cache.save(tmp_path / "cache", torch.tensor([b]))
    assert [twin.length(s) for s in twin.load(tmp_path / "cache")] == [6]
    cache.free(torch.tensor(b))
    assert cache.sequences == [fork]


def test_a_lookup_of_a_huge_count_takes_no_memory_for_it() -> None:
    cache = make("tbq4")
    step = cache.lookup(cache.alloc(), 2**31 - 1)
    with pytest.raises(ValueError, match=r"attend: q: expected shape \(2147483647, Hq, 64\)"):
        step.attend(0, torch.zeros(1, 4, 64))


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_a_refused_truncate_keeps_what_is_held(kind: str) -> None:
    """Pages that the next change would release are still there to be read."""
    cache = make(kind)
    a = cache.alloc()
    cache.extend(a, 95)
    cache.extend(a, 90)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"truncate: lengths: expected at least .* released"):
        cache.truncate(a, 80)
    assert snapshot(cache) == before
    cache.lookup(a, 50)


def test_only_the_latest_step_counts() -> None:
    cache = make("tbq4")
    a = cache.alloc()
    q, k, v = random_inputs(cache, 5, 0)
    old = cache.extend(a, 5)
    old.append(0, k[0], v[0])
    with pytest.raises(ValueError, match="append: step: expected one that extend returned, got one of lookup"):
        cache.lookup(a, 5).append(0, k[0], v[0])
    here = old.attend(1, q[1], k[1], v[1])[0]  # a lookup does not end the step
    assert torch.equal(cache.lookup(a, 5).attend(1, q[1])[0], here)
    cache.extend(a, 1)
    for call in (lambda: old.attend(0, q[0]), lambda: old.append(1, k[1], v[1])):
        with pytest.raises(ValueError, match="step: expected the cache's latest, got an older one"):
            call()
    long = cache.extend(a, 150)
    q, k, v = random_inputs(cache, 150, 1)
    with pytest.raises(ValueError, match="attend: k, v: expected both, because the step has 2 chunks, got None"):
        long.attend(0, q[0])
    with pytest.raises(ValueError, match="attend: causal: expected True, because the step has 2 chunks, got False"):
        long.attend(0, q[0], k[0], v[0], causal=False)


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
def test_what_changes_sequences_ends_their_steps(kind: str, tmp_path: Path) -> None:
    """A step names pages: those of a sequence that is gone, or shorter, may be another's by now."""
    pytest.importorskip("safetensors")
    cache = make(kind)
    a, b = cache.alloc(), cache.alloc()
    q, k, v = random_inputs(cache, 2, 0)
    cache.extend([a, b], 4)
    cache.save(tmp_path / "saved", [a])
    calls = [
        lambda: cache.truncate(b, 3), lambda: cache.load(tmp_path / "saved"), lambda: cache.pad(cache.alloc(), 3),
        lambda: cache.select([a], [0, 0]), lambda: cache.free(b),
    ]  # fmt: skip
    for call in calls:
        step, look = cache.extend([a, b]), cache.lookup([a, b])
        step.append(0, k[0], v[0])
        call()
        for late in (step.append, look.attend):
            if call is calls[3]:  # a fork alone: the same tokens in the same pages
                late(0, *([k[0], v[0]] if late == step.append else [q[0]]))
                continue
            with pytest.raises(ValueError, match="step: expected the cache's latest, got an older one"):
                late(0, *([k[0], v[0]] if late == step.append else [q[0]]))


def test_bytes() -> None:
    """4.25 bits a value at D 64, norms included; 3 % of offsets; the exact pool beside them."""
    options = {"num_pages": 1000, "page_size": 64, "max_sequences": 1, "window_left": [-1], "max_length": 640}
    sixteen = make("16bit", dtype=torch.bfloat16, **options).nbytes
    plain, offsets = make("tbq4 plain", **options).nbytes, make("tbq4 offsets", **options).nbytes
    values = 2 * 1000 * 64 * 2 * 64
    assert sixteen == pytest.approx(2 * values, rel=0.001)
    assert plain == pytest.approx(4.25 / 8 * values, rel=0.001)
    assert offsets - plain == 1000 * 2 * 64 * 2
    full = make("tbq4", dtype=torch.bfloat16, **options)
    pool = full.pages_in_use["exact pages"][1] * 16 * 2 * 64 * 2 * 2
    assert full.nbytes == pytest.approx(offsets + pool, rel=0.001)


def test_empty_steps() -> None:
    cache = make("tbq4")
    a, b = cache.alloc(), cache.alloc()
    q, k, v = random_inputs(cache, 0, 0)
    for make_step in (lambda: cache.extend([], []), lambda: cache.extend([a, b], 0), lambda: cache.lookup(a, 0)):
        out, lse = make_step().attend(0, q[0])
        assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))
    cache.extend([a, b], [0, 0]).append(0, k[0], v[0])
    assert cache.length(a) == 0


def test_inside_and_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        cache = make("tbq4")
        a = cache.alloc()
        q, k, v = random_inputs(cache, 20, 0)
        cache.extend(a, 20).attend(0, q[0], k[0], v[0])
    b = cache.fork(a)
    q, k, v = random_inputs(cache, 1, 1)
    cache.extend(b, 1).attend(0, q[0], k[0], v[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pieces", [[320] + [1] * 32, [70, 1, 1, 248] + [1] * 32, [7] * 45 + [5] + [1] * 32])
def test_real_keys(pieces: list[int], dtype: torch.dtype) -> None:
    """Qwen2.5's first layer, whose keys 4 bits alone destroy: the default recipe keeps it within .015."""
    capture = load_capture("qwen_layer0")
    q, k, v = (x.to(dtype) for x in (capture.q, capture.k, capture.v))
    errors = {}
    for name, options in (("default", {}), ("plain", {"page_offsets": False, "exact_first": 0, "exact_last": 0})):
        cache = flashq.TBQ4Cache(1, 2, 128, num_pages=8, max_sequences=1, dtype=dtype, **options)
        a, start, outs = cache.alloc(), 0, []
        for count in pieces:
            step = cache.extend(a, count)
            rows = slice(start, start + count)
            if start < 320:
                step.append(0, k[rows], v[rows])
            else:
                outs.append(step.attend(0, q[start - 320, None], k[rows], v[rows], out_dtype=torch.float32)[0])
            start += count
        truth, _ = reference.prefill(q[None], k[None], v[None], causal=True, dtype=torch.float64)
        errors[name] = relative_l2(torch.cat(outs), truth[0])
    assert errors["default"] <= 0.015
    assert errors["plain"] > 0.9
