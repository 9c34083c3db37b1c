"""The eager reference against things it does not know: the golden vectors, torch's SDPA, cases worked out by hand."""

from __future__ import annotations

import math

import golden
import pytest
import torch
import torch.nn.functional as F
from cases import page_out, randn
from torch import Tensor

from flashq import reference

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("group", golden.CODEC_GROUPS)
def test_codec_reproduces_the_golden_vectors(group: str) -> None:
    data = golden.load(group)
    codes, norms = reference.tbq4_quantize(data["x"])
    assert golden.same_bits(codes, data["codes"])
    assert torch.equal(norms.view(torch.int16), data["norms"].view(torch.int16))
    assert golden.same_bits(reference.tbq4_dequantize(codes, norms), data["decoded"])


@pytest.mark.parametrize("group", golden.ATTENTION_GROUPS)
def test_attention_reproduces_the_golden_vectors(group: str) -> None:
    data = golden.load(group)
    planes = (data[name] for name in ("k_codes", "k_norms", "v_codes", "v_norms"))
    out, lse = reference.tbq4_attention(
        data["q"],
        *planes,
        data["seqlens"],
        data["block_table"],
        scale=data["scale"].item(),
        causal=bool(data["causal"]),
        dtype=torch.float64,
    )
    torch.testing.assert_close(out, data["out"], rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, data["lse"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_prefill_equals_sdpa(causal: bool, group: int) -> None:
    q, k, v = (randn(2, 7, h, 16, seed=i).double() for i, h in enumerate((2 * group, 2, 2)))
    out, lse = reference.prefill(q, k, v, causal=causal, scale=0.3, dtype=torch.float64)
    per_head = [x.transpose(1, 2) for x in (q, k, v)]
    truth = F.scaled_dot_product_attention(*per_head, is_causal=causal, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, truth)
    scores = 0.3 * per_head[0] @ per_head[1].repeat_interleave(group, dim=1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -INF)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_visibility_by_hand() -> None:
    def rows(*args: int, **kwargs: int | bool) -> list[str]:
        return [
            "".join("x" if seen else "." for seen in row) for row in reference.visible_keys(*args, **kwargs).tolist()
        ]

    assert rows(2, 4, causal=True) == ["xxx.", "xxxx"]
    assert rows(4, 2, causal=True) == ["..", "..", "x.", "xx"]
    assert rows(3, 5, window_left=1, window_right=0) == [".xx..", "..xx.", "...xx"]
    assert rows(3, 5, window_left=0, window_right=1) == ["..xx.", "...xx", "....x"]
    assert rows(2, 4, causal=True, window_right=3) == ["xxx.", "xxxx"]
    assert rows(2, 4, kv_start=2, causal=True, window_left=2) == ["..x.", "..xx"]
    assert rows(2, 3, window_left=10**15) == ["xxx", "xxx"]


def one_row(q: Tensor, k: Tensor, v: Tensor, **kwargs: float | Tensor | None) -> tuple[Tensor, float]:
    """Attention of one query (D) over keys and values (S, D)."""
    out, lse = reference.prefill(q[None, None, None], k[None, :, None], v[None, :, None], dtype=torch.float64, **kwargs)
    return out[0, 0, 0], lse.item()


def test_score_softcap_and_sink_by_hand() -> None:
    q, k, v = torch.tensor([2.0, 0, 0, 0]), torch.zeros(2, 4), torch.zeros(2, 4)
    k[0, 0], v[0, 0], v[1, 1] = 3.0, 1.0, 1.0  # scores 6 * scale and 0
    out, lse = one_row(q, k, v)  # scale 1/2
    assert lse == pytest.approx(math.log(math.exp(3) + 1), rel=1e-12)
    assert out[0].item() == pytest.approx(math.exp(3) / (math.exp(3) + 1), rel=1e-12)
    out, lse = one_row(q, k, v, scale=-1.0, softcap=2.0, sinks=torch.tensor([0.5]))
    capped, sink = 2 * math.tanh(-6 / 2), 0.5
    total = math.exp(capped) + 1 + math.exp(sink)
    assert lse == pytest.approx(math.log(total), rel=1e-12)
    assert out.tolist() == pytest.approx([math.exp(capped) / total, 1 / total, 0, 0], rel=1e-12)


def test_rows_without_a_key_even_with_a_nan_query() -> None:
    q, k, v = torch.full((1, 3, 2, 8), NAN), randn(1, 2, 1, 8), randn(1, 2, 1, 8)
    out, lse = reference.prefill(q, k, v, causal=True)
    assert torch.equal(out[0, 0], torch.zeros(2, 8))
    assert (lse[0, :, 0] == -INF).all()
    assert out[0, 1:].isnan().all()
    assert lse[0, :, 1:].isnan().all()
    out, lse = reference.prefill(q, k[:, :0], v[:, :0], torch.tensor([1.5, -INF]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.tensor([1.5, -INF])[None, :, None].expand(1, 2, 3))


def test_nan_and_inf_reach_only_those_who_see_them() -> None:
    q, k, v = randn(1, 3, 1, 8), randn(1, 3, 1, 8, seed=1), randn(1, 3, 1, 8, seed=2)
    clean, clean_lse = reference.prefill(q, k, v, causal=True)
    bad = v.clone()
    bad[0, 1, 0, 5] = NAN
    out, lse = reference.prefill(q, k, bad, causal=True)
    assert torch.equal(lse, clean_lse)
    expected = clean.clone()
    expected[0, 1:, 0, 5] = NAN
    assert golden.same_bits(out, expected)
    bad = k.clone()
    bad[0, 1, 0, 5] = NAN
    out, lse = reference.prefill(q, bad, v, causal=True)
    assert out[0, 1:].isnan().all()
    assert lse[0, 0, 1:].isnan().all()
    assert torch.equal(out[0, 0], clean[0, 0])
    scores = torch.zeros(2, 8)
    scores[:, 0] = -INF  # every visible score -inf: NaN, as softmax of torch gives
    assert one_row(torch.ones(8), scores, torch.ones(2, 8))[0].isnan().all()


def test_decode_equals_prefill_on_a_poisoned_shuffled_cache() -> None:
    lengths, starts = (11, 0, 5), (3, 0, 0)
    keys, values = ([randn(n, 2, 8, seed=s + n) for n in lengths] for s in (0, 50))
    cache = page_out(keys, values, 4, kv_start=starts, index_dtype=torch.int64)
    q = randn(3, 2, 4, 8, seed=9)
    out, lse = reference.decode(
        q, cache.k, cache.v, cache.seqlens, cache.block_table, kv_start=torch.tensor(starts), window_left=4
    )
    for b, (n, start) in enumerate(zip(lengths, starts, strict=True)):
        truth, true_lse = reference.prefill(
            q[b : b + 1], keys[b][None, start:], values[b][None, start:], causal=True, window_left=4
        )
        torch.testing.assert_close(out[b], truth[0], msg=f"sequence {b} of length {n}")
        torch.testing.assert_close(lse[b], true_lse[0])
    packed, packed_lse = reference.decode(
        torch.cat([q[0, 1:], q[2]]),
        cache.k,
        cache.v,
        cache.seqlens,
        cache.block_table,
        torch.tensor([0, 1, 1, 3]),
        torch.tensor(starts),
        window_left=4,
    )
    torch.testing.assert_close(packed, torch.cat([out[0, 1:], out[2]]))
    torch.testing.assert_close(packed_lse, torch.cat([lse[0, :, 1:], lse[2]], dim=1))


def test_exact_tokens_are_chosen_by_position() -> None:
    """Codes that decode to zeros and an exact pool of ones show which keys a query reads exactly."""
    length, q_len = 7, 2
    codes, norms = torch.full((2, 1, 4, 32), 0x88, dtype=torch.uint8), torch.zeros(2, 1, 4, 1, dtype=torch.float16)
    pool = torch.eye(8, 64)[:, None].reshape(4, 2, 1, 64)  # slot t of the pool: value 1 in dim t
    table = torch.tensor([[0, 1, 2147480000, 3]])  # tokens 4 and 5 have no exact copy
    out, _ = reference.tbq4_attention(
        torch.zeros(1, q_len, 1, 64),
        codes,
        norms,
        codes,
        norms,
        torch.tensor([length]),
        torch.tensor([[0, 1]]),
        None,
        torch.tensor([1]),
        exact_k=torch.zeros_like(pool),
        exact_v=pool,
        exact_block_table=table,
        exact_first=2,
        exact_last=3,
    )
    seen = [(row > 0).nonzero()[:, 0].tolist() for row in out[0, :, 0]]
    # Query 0 stands at 5 and sees keys 1..5: the first two from kv_start on, and 3..5 of which 4 and 5 are missing.
    assert seen == [[1, 2, 3], [1, 2, 6]]


def test_merge_states_is_attention_over_the_union() -> None:
    q, k, v = randn(1, 2, 2, 8), randn(1, 9, 2, 8, seed=1), randn(1, 9, 2, 8, seed=2)
    parts = [
        reference.prefill(q, k[:, s], v[:, s], dtype=torch.float64) for s in (slice(0, 4), slice(4, 4), slice(4, 9))
    ]
    outs = torch.stack([p[0] for p in parts])
    outs[1] = NAN  # saw nothing, so whatever it holds is ignored
    out, lse = reference.merge_states(outs, torch.stack([p[1] for p in parts]), dtype=torch.float64)
    truth, true_lse = reference.prefill(q, k, v, dtype=torch.float64)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(lse, true_lse)
    out, lse = reference.merge_states(torch.full((0, 3, 2, 8), NAN), torch.zeros(0, 2, 3))
    assert torch.equal(out, torch.zeros(3, 2, 8))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_appends_put_tokens_where_the_slots_say() -> None:
    k, v = randn(3, 1, 64), randn(3, 1, 64, seed=1)
    caches = [torch.zeros(2, 2, 1, 64) for _ in range(2)]
    reference.kv_append_(k, v, *caches, torch.tensor([3, -1, 0]))
    assert torch.equal(caches[0][1, 1], k[0])
    assert torch.equal(caches[1][0, 0], v[2])
    assert (caches[0] != 0).any(-1).sum() == 2
    planes = [torch.zeros(2, 1, 2, 32, dtype=torch.uint8), torch.zeros(2, 1, 2, 1, dtype=torch.float16)]
    planes += [p.clone() for p in planes]
    offsets = randn(2, 1, 64, dtype=torch.float16, seed=2)
    reference.tbq4_append_(k, v, *planes, torch.tensor([3, -1, 0]), offsets)
    decoded = reference.tbq4_dequantize(planes[0], planes[1])[1, 0, 1] + offsets[1, 0]
    assert (decoded - k[0, 0]).norm() < 0.2 * (k[0, 0] - offsets[1, 0]).norm()
    assert (planes[1] != 0).sum() == 2
