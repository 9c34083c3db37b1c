"""Scores, masks and the softmax of docs/contract.md (lines 1, 5, 6): exact cases."""

from __future__ import annotations

import math

import golden
import pytest
import torch
from cases import ATTENTION, DTYPES, INF, NAN, attend, call, everywhere, plain_dtype, randn

from flashq import reference


@pytest.mark.contract(1)
@everywhere(op=ATTENTION)
def test_default_scale_and_softcap_zero(op: str, backend: torch.device) -> None:
    q, k, v = (randn(1, n, h, 64, dtype=plain_dtype(backend), seed=n * h) for n, h in ((2, 2), (9, 1), (9, 1)))
    plain = attend(op, q, k, v, device=backend)
    for options in ({"scale": 0.125}, {"softcap": 0.0}, {"scale": None}):
        assert all(map(torch.equal, attend(op, q, k, v, device=backend, **options), plain))


def seen_keys(op: str, q_len: int, kv_len: int, device: torch.device, **options: int | bool) -> list[set[int]]:
    """Which keys each query sees: equal scores, and value j in dimension j."""
    dim, dtype = 64, plain_dtype(device)
    assert kv_len <= dim
    v = torch.eye(kv_len, dim, dtype=dtype)[None, :, None]
    if op == "tbq4_attention":  # 4 bits cannot hold a unit vector, so an exact pool of one page does
        codes, norms = torch.zeros(1, 1, kv_len, 32, dtype=torch.uint8), torch.zeros(1, 1, kv_len, 1).half()
        out, _ = call(
            op, torch.zeros(1, q_len, 1, dim, dtype=dtype), codes, norms, codes, norms, torch.tensor([kv_len]),
            exact_k=torch.zeros_like(v), exact_v=v, exact_block_table=torch.tensor([[0]]),
            exact_first=kv_len, device=device, **options,
        )  # fmt: skip
    else:
        out, _ = attend(
            op, torch.zeros(1, q_len, 1, dim, dtype=dtype), torch.zeros_like(v), v, device=device, **options
        )
    return [set(row.nonzero()[:, 0].tolist()) for row in out[0, :, 0]]


@pytest.mark.contract(5)
@everywhere(op=ATTENTION, lengths=[(1, 1), (3, 7), (7, 3), (8, 40), (20, 20), (5, 64), (33, 1)])
def test_who_sees_whom(op: str, lengths: tuple[int, int], backend: torch.device) -> None:
    q_len, kv_len = lengths
    off = kv_len - q_len
    rights = (-1, 0, 2) if op == "prefill" else (-1,)
    for causal in (False, True):
        for left in (-1, 0, 1, 5, 40):
            for right in rights:
                options = {"causal": causal, "window_left": left}
                if op == "prefill":
                    options["window_right"] = right
                seen = seen_keys(op, q_len, kv_len, backend, **options)
                for i in range(q_len):
                    expected = {
                        j
                        for j in range(kv_len)
                        if (not causal or j <= i + off)
                        and (left == -1 or j >= i + off - left)
                        and (right == -1 or j <= i + off + right)
                    }
                    assert seen[i] == expected, (i, options)


@pytest.mark.contract(5)
@everywhere(op=ATTENTION)
def test_windows_beyond_any_length(op: str, backend: torch.device) -> None:
    q, k, v = (randn(1, n, h, 64, dtype=plain_dtype(backend), seed=n * h) for n, h in ((3, 2), (9, 1), (9, 1)))
    wide = 2**63 - 1
    options = {"window_left": wide} | ({"window_right": wide} if op == "prefill" else {})
    for causal in (False, True):
        plain = attend(op, q, k, v, device=backend, causal=causal)
        assert all(map(torch.equal, attend(op, q, k, v, device=backend, causal=causal, **options), plain))


@pytest.mark.contract(6)
@everywhere(op=["prefill", "decode"], dtype=DTYPES)
def test_one_visible_key_gives_its_value_bit_for_bit(op: str, dtype: torch.dtype, backend: torch.device) -> None:
    for length in (1, 2, 65, 130):
        for dim in (8, 64, 80, 256):
            q, k, v = (randn(2, length, h, dim, dtype=dtype, seed=h) for h in (6, 2, 2))
            k *= 3
            v[:, -1] = -0.0
            out, lse = attend(op, q, k, v, device=backend, causal=True, window_left=0, scale=-1.7)
            assert golden.same_bits(out, v.repeat_interleave(3, dim=2))
            score = -1.7 * (q.double() * k.repeat_interleave(3, dim=2).double()).sum(-1).transpose(1, 2)
            torch.testing.assert_close(lse.double(), score, rtol=1e-6, atol=1e-4)


@pytest.mark.contract(6, 7)
@everywhere(op=["prefill", "decode"], dtype=DTYPES)
def test_a_visible_key_that_scores_minus_infinity_is_none(op: str, dtype: torch.dtype, backend: torch.device) -> None:
    """Alone it leaves 0 / 0, NaN as in eager attention, and beside a sink nothing."""
    q, k = torch.ones(1, 1, 2, 64, dtype=dtype), torch.full((1, 1, 1, 64), -INF, dtype=dtype)
    v = randn(1, 1, 1, 64, dtype=dtype)
    for sinks in (None, torch.tensor([0.5, -INF])):
        out, lse = attend(op, q, k, v, device=backend, sinks=sinks)
        expected, expected_lse = reference.prefill(q, k, v, sinks)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
        assert out[0, 0, 1].isnan().all()
    ends = torch.cat([k, torch.zeros_like(k)], dim=1)  # alone to the first query, not to the second
    out, lse = attend(op, q.expand(1, 2, 2, 64), ends, v.expand(1, 2, 1, 64), device=backend, causal=True)
    assert out[0, 0].isnan().all()
    assert torch.equal(out[0, 1], v[0, 0].expand(2, 64))
    assert torch.equal(lse[0], torch.tensor([[-INF, 0.0]]).expand(2, 2))


@pytest.mark.contract(6)
@everywhere(op=ATTENTION, sink=[None, 1.5, -INF])
def test_rows_without_a_visible_key(op: str, sink: float | None, backend: torch.device) -> None:
    for dtype in DTYPES if backend.type == "cpu" else DTYPES[1:]:
        q = torch.full((1, 70, 4, 64), NAN, dtype=dtype)
        k, v = (randn(1, 3, 2, 64, dtype=dtype, seed=i) for i in (1, 2))
        sinks = None if sink is None else torch.full((4,), sink)
        out, lse = attend(op, q, k, v, device=backend, sinks=sinks, causal=True)
        assert torch.equal(out[:, :-3], torch.zeros_like(out[:, :-3]))
        assert (lse[..., :-3] == (-INF if sink is None else sink)).all()
        assert out[:, -3:].isnan().all()
        assert lse[..., -3:].isnan().all()


@pytest.mark.contract(6)
@everywhere(op=ATTENTION)
def test_lse_is_the_natural_logarithm_of_the_sum(op: str, backend: torch.device) -> None:
    dtype = plain_dtype(backend)
    for n in (1, 2, 63, 64, 65, 300):
        k = torch.zeros(1, n, 1, 64, dtype=dtype)
        _, lse = attend(op, torch.zeros(1, 2, 2, 64, dtype=dtype), k, k, device=backend)
        expected = torch.tensor([math.log(n)] if op == "prefill" else [math.log(max(n - 1, 0) or 1), math.log(n)])
        if op != "prefill" and n == 1:
            expected[0] = -INF  # the first of two queries stands before the only key
        torch.testing.assert_close(lse, expected.expand(1, 2, 2), rtol=0, atol=2e-6)
        sinks = torch.tensor([0.5, -INF])
        _, with_sink = attend(op, torch.zeros(1, 1, 2, 64, dtype=dtype), k, k, device=backend, sinks=sinks)
        expected = torch.tensor([math.log(n + math.exp(0.5)), math.log(n)])[None, :, None]
        torch.testing.assert_close(with_sink, expected, rtol=0, atol=2e-6)


@pytest.mark.contract(6)
@everywhere(op=["prefill", "decode"])
def test_a_finite_score_wins_however_low(op: str, backend: torch.device) -> None:
    """Scores of -2^100 in tiles after masked ones; a finite sentinel for "masked" would win over them."""
    dtype = torch.float32 if backend.type == "cpu" else torch.bfloat16
    q, k = torch.full((1, 1, 1, 8), 2.0**34, dtype=dtype), torch.zeros(1, 200, 1, 8, dtype=dtype)
    v = randn(1, 200, 1, 8, dtype=dtype)
    k[0, :, 0, 0] = -(2.0**66)
    out, lse = attend(op, q, k, v, device=backend, scale=1.0, causal=True, window_left=3)
    torch.testing.assert_close(out[0, 0, 0], v[0, -4:, 0].float().mean(0).to(dtype))
    torch.testing.assert_close(lse, torch.full((1, 1, 1), -(2.0**100)), rtol=1e-6, atol=0)
