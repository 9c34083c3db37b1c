"""Finite options and huge views at the ends of their ranges: the right number or an error that says what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashq
from flashq import reference

pytestmark = pytest.mark.usefixtures("isa")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.contract(1)
@pytest.mark.parametrize(
    ("scale", "softcap", "magnitude"),
    [(3e38, 0.0, 1e-20), (1e30, 1e-9, 1e-16), (1e-30, 3e38, 1e15), (3e38, 3e38, 1e-20), (2.0, 1e-37, 1.0)],
)
@pytest.mark.parametrize("queries", [1, 40])  # the kernels for few and for many rows
def test_any_finite_scale_and_softcap(scale: float, softcap: float, magnitude: float, queries: int) -> None:
    """Factors whose product or quotient leaves the range of float32, though the scores themselves do not."""
    q, k, v = (
        randn(1, queries, 2, 64, seed=0) * magnitude,
        randn(1, 90, 1, 64, seed=1) * magnitude,
        randn(1, 90, 1, 64, seed=2),
    )
    options = {"scale": scale, "softcap": softcap}
    out, lse = flashq.prefill(q, k, v, **options)
    stats: dict[str, float] = {}
    truth, true_lse = reference.prefill(q, k, v, **options, dtype=torch.float64, stats=stats)
    torch.testing.assert_close(out, truth.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, true_lse.float(), rtol=0, atol=1e-5 + 5e-7 * stats["max_score"])


@pytest.mark.contract(16)
def test_a_softcap_that_float32_rounds_to_zero_is_refused() -> None:
    q = randn(1, 2, 2, 64, seed=0)
    with pytest.raises(RuntimeError, match=r"flashq::prefill: softcap: expected a finite float32 .*, got 1e-50"):
        flashq.prefill(q, q, q, softcap=1e-50)


@pytest.mark.contract(16)
def test_an_output_that_no_memory_holds() -> None:
    base = torch.zeros(64)
    q = base.as_strided((1 << 20, 1 << 20, 8, 64), (0, 0, 0, 1))
    kv = base.as_strided((1 << 20, 1, 8, 64), (0, 0, 0, 1))
    with pytest.raises(RuntimeError, match=r"flashq::prefill: memory: expected room for a tensor") as error:
        flashq.prefill(q, kv, kv)
    assert ".cpp" not in str(error.value)


@pytest.mark.contract(16)
@pytest.mark.parametrize("queries", [8, 64, 1024])
def test_partial_results_that_no_memory_holds(queries: int) -> None:
    """2^51 splits: above 2^63 bytes, and what is left of such a number in 64 bits may be small."""
    cache = torch.zeros(8).as_strided((1, 1 << 59, 1, 8), (0, 0, 0, 1))
    with pytest.raises(RuntimeError, match=r"flashq::decode: memory: expected room for a tensor"):
        flashq.decode(torch.zeros(1, queries, 1, 8), cache, cache, torch.tensor([1 << 59]), kv_chunk=256)


@pytest.mark.contract(14)
def test_no_queries_of_very_many_sequences() -> None:
    base = torch.zeros(64)
    q = base.as_strided((1 << 40, 0, 2, 64), (0, 0, 0, 1))
    kv = base.as_strided((1 << 40, 1, 2, 64), (0, 0, 0, 1))
    out, lse = flashq.prefill(q, kv, kv)
    assert out.shape == q.shape
    assert lse.shape == (1 << 40, 2, 0)


@pytest.mark.contract(9)
def test_a_table_that_names_more_tokens_than_there_are_numbers() -> None:
    cache = randn(1, 1, 2, 64, seed=0).as_strided((1, 1 << 40, 2, 64), (0, 0, 64, 1))
    table = torch.zeros(1, 1, dtype=torch.int32).as_strided((1, 1 << 40), (0, 0))
    q = randn(1, 1, 2, 64, seed=1)
    out, _ = flashq.decode(q, cache, cache, torch.tensor([3]), table)
    torch.testing.assert_close(out[0, 0], cache[0, 0], rtol=0, atol=1e-6)
