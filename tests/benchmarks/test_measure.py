"""The statistics of a row, and that a row measures what it says."""

import time

import pytest

from benchmarks.measure import Case, Result, Setup, Spread, measure, spread_of


def test_spread_is_median_and_quartiles() -> None:
    assert spread_of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert spread_of([2.0]) == Spread(2.0, 2.0, 2.0, 1)


def sleeper(seconds: float) -> Setup:
    calls = {"flashq": lambda: time.sleep(seconds), "peer": lambda: time.sleep(3 * seconds)}
    return Setup(calls, work=1e9, ceiling=lambda: 4e11)


def test_rate_share_and_ratio() -> None:
    case = Case("suite", "row", "GFLOP/s", lambda: sleeper(0.01))
    result = measure(case, seconds=0.3)
    assert result.rate == pytest.approx(1 / result.seconds["flashq"].median)
    assert 0 < result.rate <= 100
    assert result.ceiling == pytest.approx(400)
    assert result.share == pytest.approx(result.rate / 400)
    assert 1.5 < result.ratios["peer"] < 6
    assert list(result.seconds) == ["flashq", "peer"]
    assert Result.from_json(result.to_json()) == result


def test_row_without_ceiling() -> None:
    result = measure(Case("suite", "row", "GB/s", lambda: Setup({"flashq": lambda: None}, work=1.0)), seconds=0.0)
    assert result.ceiling is None
    assert result.share is None
    assert result.ratios == {}
