"""tbq4_attention where integer products could go wrong: ends of the range, scores and norms of any size, poison."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from cases import call, plain_dtype
from torch import Tensor

from flashq import reference

DIMS = (64, 128, 256)
CPU = torch.device("cpu")


class Cache(NamedTuple):
    """Planes of one sequence, contiguous, with one KV head."""

    k_codes: Tensor
    k_norms: Tensor
    v_codes: Tensor
    v_norms: Tensor
    seqlens: Tensor


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encode(k: Tensor, v: Tensor) -> Cache:
    """k, v (L, D)."""
    planes = [plane[None, None] for x in (k, v) for plane in reference.tbq4_quantize(x)]
    return Cache(*planes, torch.tensor([len(k)]))


def attend(q: Tensor, cache: Cache, device: torch.device, **options: object) -> tuple[Tensor, Tensor]:
    """q (Sq, Hq, D) -> out (Sq, Hq, D), lse (Hq, Sq), both fp32."""
    out, lse = call("tbq4_attention", q[None], *cache, device=device, **options, out_dtype=torch.float32)
    return out[0], lse[0]


def check(q: Tensor, cache: Cache, device: torch.device, **options: object) -> tuple[Tensor, Tensor]:
    """q (Sq, Hq, D) against eager attention in fp64 over the decoded cache -> out (Sq, Hq, D), lse (Hq, Sq)."""
    stats: dict[str, float] = {}
    q = q.to(plain_dtype(device))
    out, lse = attend(q, cache, device, **options)
    true_out, true_lse = reference.tbq4_attention(q[None], *cache, **options, dtype=torch.float64, stats=stats)
    assert (out - true_out[0]).norm() <= 2e-3 * true_out.norm()
    assert (lse - true_lse[0]).abs().max() <= 2e-3 + 5e-5 * stats["max_score_no_offset"] + 1e-6 * stats["max_score"]
    return out, lse


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_codes_against_flat_operands(dim: int, sign: int, backend: torch.device) -> None:
    """Every product at its largest and of one sign: sums of 128 dims, and of the 64 keys of a tile, fill int32."""
    blocks = dim // (64 if dim == 64 else 128)
    codes = torch.full((1, 1, 64, dim // 2), 0xFF, dtype=torch.uint8)
    norms = torch.ones(1, 1, 64, blocks, dtype=torch.float16)
    q = reference.tbq4_rotate(torch.full((1, 1, dim), float(sign)), inverse=True)
    _, lse = check(q, Cache(codes, norms, codes, norms, torch.tensor([64])), backend, causal=False)
    assert lse.isfinite().all()


@pytest.mark.parametrize("dim", DIMS)
def test_one_hot_rotated_query(dim: int, backend: torch.device) -> None:
    """A query that is a spike after rotation has all its weight in one dim of the codes."""
    spike = torch.zeros(4, 1, dim)
    spike[range(4), 0, [0, 1, dim // 2, dim - 1]] = 5
    check(
        reference.tbq4_rotate(spike, inverse=True),
        encode(randn(200, dim), randn(200, dim, seed=1)),
        backend,
        causal=False,
    )


@pytest.mark.parametrize("dim", DIMS)
def test_norms_from_1e_4_to_6e4_in_one_tile(dim: int, backend: torch.device) -> None:
    """The weights of a row span the norms of its values, whatever other rows see."""
    length = 96
    size = torch.logspace(-4, 4.778, length)[torch.randperm(length, generator=torch.Generator().manual_seed(2)), None]
    v = torch.nn.functional.normalize(randn(length, dim, seed=1), dim=-1) * size
    cache = encode(randn(length, dim), v)
    assert cache.v_norms.max() > 4e4
    assert cache.v_norms.min() < 2e-4
    check(randn(3, 4, dim, seed=3), cache, backend, causal=False)
    # Queries that look at one key: its value has to survive beside one that is 6e8 times longer.
    k = cache.k_codes, cache.k_norms
    decoded = reference.tbq4_dequantize(*k)[0, 0]
    for key in (size[:, 0].argmin().item(), size[:, 0].argmax().item()):
        q = (decoded[key] * 200 / decoded[key].norm() ** 2 * dim**0.5)[None, None]
        check(q, cache, backend, causal=False)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("top", [20, 60, 300, 12_700])
def test_scores_of_any_size(dim: int, top: int, backend: torch.device) -> None:
    """Two keys compete at a score of `top`: its error is the output's."""
    k = randn(300, dim)
    k[100] = k[7] + 0.05 * randn(dim, seed=5)
    cache = encode(k, randn(300, dim, seed=1))
    decoded = reference.tbq4_dequantize(cache.k_codes, cache.k_norms)[0, 0].double()
    pair = decoded[[7, 100]].T
    # q in the plane of the two keys, with equal scores.
    q = pair @ torch.linalg.solve(pair.T @ pair, torch.full((2,), float(top), dtype=torch.float64)) * dim**0.5
    out, _ = check(q.float()[None, None], cache, backend, causal=False)
    if backend.type == "cuda":
        return  # the query is rounded to fp16, so one of the two wins
    values = reference.tbq4_dequantize(cache.v_codes, cache.v_norms)[0, 0]
    if top > 20:
        assert (out[0, 0] - values[[7, 100]].mean(0)).norm() < 0.05 * out.norm()


@pytest.mark.parametrize("dim", DIMS)
def test_short_and_long_queries_share_a_tile(dim: int, isa: str) -> None:
    """Rows whose scores need fp32 and rows that do not, side by side; each as precise, and the same bits, as alone."""
    cache = encode(randn(200, dim), randn(200, dim, seed=1))
    q = randn(1, 7, dim, seed=3) * torch.tensor([1, 40, 1, 1, 90, 40, 1.0])[:, None]
    out, lse = check(q, cache, CPU)
    for row in range(7):
        alone, alone_lse = check(q[:, row : row + 1], cache, CPU)
        assert torch.equal(out[:, row : row + 1], alone)
        assert torch.equal(lse[row : row + 1], alone_lse)


@pytest.mark.parametrize("factor", [1e-36, 1e-33, 1e-30, 1e-25, 1e-20, 1e20, 1e36])
def test_query_of_any_size(factor: float, isa: str) -> None:
    """The scale of the query cancels in the scale of the scores."""
    cache = encode(randn(100, 128), randn(100, 128, seed=1))
    check(randn(2, 3, 128, seed=3) * factor, cache, CPU, scale=128**-0.5 / factor)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poisoned_norms_reach_the_rows_that_see_them(dim: int, value: float, backend: torch.device) -> None:
    blocks = dim // (64 if dim == 64 else 128)
    width = dim // blocks
    q = randn(3, 2, dim, seed=3).to(plain_dtype(backend))  # query i sees keys 0 .. 97 + i
    for block in range(blocks):
        cache = encode(randn(100, dim), randn(100, dim, seed=1))
        cache.k_norms[0, 0, 98, block] = value
        out, lse = attend(q, cache, backend)
        assert out[0].isfinite().all()
        assert lse[:, 0].isfinite().all()
        assert out[1:].isnan().all()
        assert lse[:, 1:].isnan().all()

        cache = encode(randn(100, dim), randn(100, dim, seed=1))
        cache.v_norms[0, 0, 98, block] = value
        out, lse = attend(q, cache, backend)
        assert lse.isfinite().all()
        assert out[0].isfinite().all()
        bad = torch.zeros(dim, dtype=torch.bool)
        bad[block * width : (block + 1) * width] = True
        assert not out[1:][..., bad].isfinite().any()
        assert out[1:][..., ~bad].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("plane", ["k", "v"])
def test_poison_of_the_exact_pool_reaches_the_rows_that_read_it(dim: int, plane: str) -> None:
    """Queries 0, 1 and 2 share a tile of rows. Query i reads keys 0 to 3 and 90 + i to 97 + i exactly."""
    q, cache = randn(3, 2, dim, seed=3).half(), encode(randn(100, dim), randn(100, dim, seed=1))
    pool = [randn(5, 20, 1, dim, seed=seed).half() for seed in (4, 5)]
    table = torch.arange(5, dtype=torch.int32)[None]

    def attend_exactly() -> tuple[Tensor, Tensor]:
        options = {"exact_first": 4, "exact_last": 8, "exact_block_table": table}
        return attend(q, cache, torch.device("cuda"), exact_k=pool[0], exact_v=pool[1], **options)

    true_out, true_lse = attend_exactly()
    for token, readers in ((2, [0, 1, 2]), (90, [0]), (91, [0, 1]), (98, [1, 2]), (99, [2])):
        values = pool["kv".index(plane)][token // 20, token % 20, 0]
        kept = values[7].clone()
        values[7] = float("nan")
        out, lse = attend_exactly()
        values[7] = kept
        others = [i for i in range(3) if i not in readers]
        assert torch.equal(out[others], true_out[others])
        assert torch.equal(lse[:, others], true_lse[:, others])
        assert out[readers][..., 7].isnan().all()
        assert lse[:, readers].isnan().all() if plane == "k" else torch.equal(lse, true_lse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_poisoned_query_is_nan_alone(value: float, backend: torch.device) -> None:
    cache = encode(randn(100, 128), randn(100, 128, seed=1))
    q = randn(1, 7, 128, seed=3).to(plain_dtype(backend))
    q[0, 2, 5] = value
    out, lse = attend(q, cache, backend)
    assert out[0, 2].isnan().all()
    assert lse[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6]
    assert out[0, others].isfinite().all()
    assert lse[others].isfinite().all()


def test_negative_and_zero_norms(backend: torch.device) -> None:
    cache = encode(randn(100, 128), randn(100, 128, seed=1))
    cache.k_norms[0, 0, ::3] *= -1
    cache.v_norms[0, 0, 1::3] *= -1
    cache.k_norms[0, 0, 5:9] = 0
    check(randn(2, 3, 128, seed=3), cache, backend)
    cache.v_norms.zero_()
    out, _ = attend(randn(2, 3, 128).to(plain_dtype(backend)), cache, backend)
    assert (out == 0).all()


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 256])
@pytest.mark.parametrize("dim", DIMS)
def test_pages_do_not_change_a_bit(page_size: int, dim: int, backend: torch.device) -> None:
    length = 150
    whole = encode(randn(length, dim), randn(length, dim, seed=1))
    pages = -(-length // page_size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(4))
    planes = []
    for plane in whole[:4]:
        paged = plane.new_full(
            (pages, 1, page_size, plane.shape[-1]), 255 if plane.dtype == torch.uint8 else float("nan")
        )
        for i, page in enumerate(order.tolist()):
            part = plane[0, 0, i * page_size : (i + 1) * page_size]
            paged[page, 0, : len(part)] = part
        planes.append(paged)
    q = randn(1, 3, 2, dim, seed=3).to(plain_dtype(backend))
    expected = call("tbq4_attention", q, *whole, device=backend)
    actual = call("tbq4_attention", q, *planes, whole.seqlens, order[None], device=backend)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
