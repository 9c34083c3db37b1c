"""merge_states: a commutative monoid with the identity (0, -inf), on every device."""

from __future__ import annotations

import itertools

import golden
import pytest
import torch
from cases import DTYPES, randn

import flashq
from flashq import reference

INF, NAN = float("inf"), float("nan")


def partials(
    count: int, *, batch: int | None, dtype: torch.dtype, head_dim: int = 40
) -> tuple[torch.Tensor, torch.Tensor]:
    middle = () if batch is None else (batch,)
    outs = randn(count, *middle, 5, 3, head_dim, dtype=dtype, seed=count)
    lses = 4 * randn(count, *middle, 3, 5, seed=count + 1)
    return outs, lses


def assert_merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flashq.merge_states(outs, lses)
    truth, true_lse = reference.merge_states(outs, lses, dtype=torch.float64)
    assert out.dtype == outs.dtype
    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(
        out.double(), truth, rtol=torch.finfo(outs.dtype).eps, atol=1e-6, equal_nan=True, check_dtype=False
    )
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=2e-6, equal_nan=True)
    return out, lse


@pytest.mark.contract(3, 10)
@pytest.mark.parametrize("batch", [None, 2, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_reference(dtype: torch.dtype, count: int, batch: int | None, device: torch.device) -> None:
    outs, lses = partials(count, batch=batch, dtype=dtype)
    lses[0].flatten()[::2] = -INF
    outs[0] = torch.where((lses[0] == -INF).transpose(-1, -2)[..., None], NAN, outs[0])
    assert_merged(outs.to(device), lses.to(device))


@pytest.mark.contract(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype, device: torch.device) -> None:
    outs, lses = (x.to(device) for x in partials(3, batch=2, dtype=dtype))
    expected = flashq.merge_states(outs, lses)
    room = torch.full((*outs.shape[:-1], 47), NAN, dtype=dtype, device=device)
    room[..., 3:43] = outs
    views = (
        (room[..., 3:43], lses),
        (outs.transpose(2, 3).contiguous().transpose(2, 3), lses.transpose(-1, -2).contiguous().transpose(-1, -2)),
        (outs.flip(0).flip(0), lses.repeat_interleave(2, dim=-1)[..., ::2]),
    )
    for view in views:
        got = flashq.merge_states(*view)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    one = flashq.merge_states(outs[:1].expand(4, *outs.shape[1:]), lses[:1].expand(4, *lses.shape[1:]))
    torch.testing.assert_close(one[0], outs[0])


@pytest.mark.contract(10)
def test_a_lone_partial_keeps_its_bits(device: torch.device) -> None:
    outs, lses = (x.to(device) for x in partials(1, batch=2, dtype=torch.float32))
    lses *= 30
    out, lse = flashq.merge_states(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
    nothing = torch.full_like(outs, NAN), torch.full_like(lses, -INF)
    for order in ((0, 1), (1, 0)):
        pairs = ((outs, lses), nothing)
        out, lse = flashq.merge_states(*(torch.cat([pairs[i][j] for i in order]) for j in (0, 1)))
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])


@pytest.mark.contract(10)
def test_order_and_grouping_do_not_matter(device: torch.device) -> None:
    outs, lses = (x.to(device) for x in partials(4, batch=2, dtype=torch.float32))
    whole = flashq.merge_states(outs, lses)
    for order in itertools.permutations(range(4)):
        out, lse = flashq.merge_states(outs[list(order)], lses[list(order)])
        torch.testing.assert_close(out, whole[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, whole[1], rtol=1e-6, atol=1e-6)
    left, right = flashq.merge_states(outs[:3], lses[:3]), (outs[3], lses[3])
    out, lse = flashq.merge_states(*(torch.stack(pair) for pair in zip(left, right, strict=True)))
    torch.testing.assert_close(out, whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole[1], rtol=1e-6, atol=1e-6)


@pytest.mark.contract(6, 14)
def test_nothing_to_merge(device: torch.device) -> None:
    out, lse = flashq.merge_states(torch.empty(0, 2, 5, 3, 40, device=device), torch.empty(0, 2, 3, 5, device=device))
    assert torch.equal(out, torch.zeros(2, 5, 3, 40, device=device))
    assert torch.equal(lse, torch.full((2, 3, 5), -INF, device=device))
    outs, lses = torch.full((3, 5, 3, 40), NAN, device=device), torch.full((3, 3, 5), -INF, device=device)
    out, lse = flashq.merge_states(outs, lses)
    assert torch.equal(out, torch.zeros(5, 3, 40, device=device))
    assert torch.equal(lse, torch.full((3, 5), -INF, device=device))
    for shape in ((2, 0, 5, 3, 40), (2, 2, 0, 3, 40), (2, 2, 5, 0, 40), (2, 2, 5, 3, 0)):
        k, b, s, h, _ = shape
        out, lse = flashq.merge_states(torch.empty(shape, device=device), torch.zeros(k, b, h, s, device=device))
        assert out.shape == shape[1:]
        assert lse.shape == (b, h, s)
        torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


@pytest.mark.contract(7)
def test_nan_is_never_turned_into_a_number(device: torch.device) -> None:
    outs, lses = (x.to(device) for x in partials(3, batch=2, dtype=torch.float32))
    lses[1, 0, 2, 4] = NAN
    outs[2, 1, 3, 1, 7] = NAN
    out, lse = flashq.merge_states(outs, lses)
    assert out[0, 4, 2].isnan().all()
    assert lse[0, 2, 4].isnan()
    assert out[1, 3, 1, 7].isnan()
    clean = flashq.merge_states(outs.nan_to_num(), lses.nan_to_num())
    keep = ~out.isnan()
    assert golden.same_bits(torch.where(keep, out, 0.0), torch.where(keep, clean[0], 0.0))
    assert out.isnan().sum() == 41
    assert lse.isnan().sum() == 1


@pytest.mark.contract(6, 10)
def test_a_large_gap_leaves_the_larger(device: torch.device) -> None:
    outs, lses = (x.to(device) for x in partials(2, batch=None, dtype=torch.float32))
    lses[0], lses[1] = -1e30, -1e20
    out, lse = flashq.merge_states(outs, lses)
    assert torch.equal(out, outs[1])
    assert torch.equal(lse, lses[1])
