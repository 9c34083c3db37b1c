"""Turns, medians and the texts of figures."""

import time

import pytest

from flashq.cli import timing
from flashq.cli.timing import format_bytes, format_seconds, medians, take_turns, times_as_fast


def test_contenders_take_turns_after_an_untimed_call() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: (order.append(name), time.sleep(3e-3)) for name in "ab"}
    taken = take_turns(calls, seconds=0.0, sample=1e-3)
    assert [len(values) for values in taken.values()] == [5, 5]
    assert order == list("aabb") + list("ab") * 5  # called once untimed, once to choose the repeats
    assert all(value >= 3e-3 for value in taken["a"])


def test_short_calls_are_repeated_and_reported_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, count = 0.0, 0

    def call() -> None:  # takes 2 us, whatever else the machine does
        nonlocal clock, count
        clock += 2e-6
        count += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    taken = take_turns({"a": call}, seconds=0.0, sample=1e-3)
    assert count == 2 + 5 * 500  # untimed, to choose the repeats, then five samples of 1 ms
    assert taken["a"] == pytest.approx([2e-6] * 5)


def test_time_limit_ends_it() -> None:
    start = time.perf_counter()
    taken = take_turns({"a": lambda: time.sleep(0.01)}, seconds=0.2)
    assert 5 < len(taken["a"]) < 40
    assert time.perf_counter() - start < 2


def test_medians() -> None:
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
    # Round by round b takes twice as long, but for the second round.
    assert times_as_fast({"a": [1.0, 2.0, 2.0], "b": [2.0, 2.0, 4.0]}, "a", "b") == 2.0


def test_texts() -> None:
    assert [format_seconds(x) for x in (1.5, 0.0123, 1.234e-4, 5e-8)] == ["1.5 s", "12.3 ms", "123 µs", "50 ns"]
    assert [format_bytes(x) for x in (12, 393216, 2.5e9)] == ["12 B", "393 kB", "2.5 GB"]
