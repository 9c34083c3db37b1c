"""tbq4_attention on CUDA for many query rows, where codes are expanded for 128 rows at once: every option against eager
attention over the decoded cache."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_lse, check_tbq4, relative_l2
from cases import DTYPES, SCALES, SINKS, call, case_id, encode_pages, lay_out, page_out, pairwise, randn
from test_tbq4_attention import INDEX_DTYPES, build

from flashq import reference, tbq4

pytestmark = pytest.mark.cuda

CASES = pairwise(
    head_dim=(128, 64, 256),
    dtype=DTYPES[1:],
    group=(4, 1, 6, 8, 16),
    q_len=(150, 256, 300, 512),
    lengths=((700, 1, 300), (40, 0, 1300), (400, 401, 417), (2100, 64, 65)),
    page_size=(64, 16, 48, 256),
    mask=((True, -1), (False, -1), (True, 40), (True, 0), (False, 200)),
    kv_start=(False, True),
    offsets=("none", "small", "large", "strided"),
    exact=((0, 0), (4, 64), (0, 20), (5, 0), (4, 1000)),
    exact_page=(16, 1, 64),
    holes=(False, True),
    softcap=(0.0, 15.0),
    sinks=SINKS,
    scale=SCALES,
    index_dtype=INDEX_DTYPES,
    layout=("contiguous", "heads_first", "padded"),
)


@pytest.mark.contract(1, 2, 3, 4, 5, 6, 8, 9, 17)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_many_rows(case: dict) -> None:
    args, options = build(case | {"kv_chunk": 0})
    out, lse = check_tbq4(*args, device="cuda", **options)
    rounded, same_lse = call("tbq4_attention", *args, device="cuda", **options)
    assert rounded.dtype == case["dtype"]
    torch.testing.assert_close(rounded.float(), out, rtol=torch.finfo(case["dtype"]).eps, atol=1e-6)
    assert torch.equal(same_lse, lse)


@pytest.mark.contract(4, 10)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("exact", [(0, 0), (4, 100)])
def test_keys_are_split_for_short_queries(head_dim: int, exact: tuple[int, int]) -> None:
    """A context of several splits, of which a window or kv_start leaves some without a visible key."""
    case = CASES[0] | {
        "head_dim": head_dim, "exact": exact, "lengths": (9000, 5000), "q_len": 120, "group": 4, "mask": (True, -1),
        "kv_start": False, "sinks": "some", "softcap": 0.0, "scale": None, "page_size": 64, "kv_chunk": 0,
    }  # fmt: skip
    for change in ({}, {"mask": (True, 5000)}, {"kv_start": True}, {"offsets": "large"}):
        args, options = build(case | change)
        check_tbq4(*args, device="cuda", big=True, **options)


@pytest.mark.contract(9)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_lengths", [(150, 0, 40), (1, 1, 300), (16, 200, 33)])
def test_packed_queries(q_lengths: tuple[int, ...], head_dim: int) -> None:
    lengths, tail = (300, 17, 900), 3
    keys, values = ([randn(n, 2, head_dim, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 11))
    planes = encode_pages(page_out(keys, values, 16))
    cu_q = torch.tensor([0, *q_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = randn(int(cu_q[-1]) + tail, 8, head_dim, dtype=torch.float16)
    start = torch.tensor([3, 17, 0], dtype=torch.int32)
    out, lse = check_tbq4(q, *planes.args(), cu_q, start, window_left=250, device="cuda")
    assert torch.equal(out[-tail:], torch.zeros_like(out[-tail:]))
    assert (lse[:, -tail:] == float("-inf")).all()


@pytest.mark.contract(1)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_offset_scores_keep_fp32_precision(head_dim: int, exact: bool) -> None:
    """Scores of thousands, of which page offsets are nearly all; of exact keys the products themselves."""
    direction = randn(1, head_dim)
    direction *= 800 / direction.norm()
    keys = [(randn(300, 1, head_dim, seed=1) + direction).half()]
    cache = page_out(keys, [randn(300, 1, head_dim, seed=2).half()], 64)
    offsets = direction.half().expand(len(cache.k), 1, head_dim)
    planes = encode_pages(cache, offsets)
    pool = [cache.k, cache.v, cache.block_table] if exact else []
    options = {"exact_first": 4, "exact_last": 64} if exact else {}
    q = (randn(1, 60, 4, head_dim, seed=3) + direction / 50).half()
    check_tbq4(q, *planes.args(), None, None, None, offsets, *pool, scale=1.0, device="cuda", **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("top", [20, 60, 300, 12_700])
def test_scores_of_any_size(head_dim: int, top: int) -> None:
    """In every row two keys compete at a score of `top`."""
    k = randn(300, 1, head_dim)
    k[100] = k[7] + 0.05 * randn(1, head_dim, seed=5)
    planes = encode_pages(page_out([k], [randn(300, 1, head_dim, seed=1)], 64))
    decoded = reference.tbq4_dequantize(planes.k_codes, planes.k_norms).transpose(1, 2).flatten(0, 1)
    table, page_size = planes.block_table[0], planes.k_codes.shape[2]
    pair = torch.stack([decoded[table[i // page_size] * page_size + i % page_size, 0] for i in (7, 100)], 1).double()
    q = pair @ torch.linalg.solve(pair.T @ pair, torch.full((2,), float(top), dtype=torch.float64)) * head_dim**0.5
    rows = q.float() * torch.linspace(0.2, 1, 64)[:, None]
    check_tbq4(rows.half()[None, :, None].expand(1, 64, 4, head_dim), *planes.args(), causal=False, device="cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_norms_from_1e_4_to_6e4_in_one_tile(head_dim: int) -> None:
    length = 96
    size = torch.logspace(-4, 4.778, length)[torch.randperm(length, generator=torch.Generator().manual_seed(2)), None]
    v = torch.nn.functional.normalize(randn(length, head_dim, seed=1), dim=-1) * size
    planes = encode_pages(page_out([randn(length, 1, head_dim)], [v[:, None]], 64))
    check_tbq4(randn(1, 60, 4, head_dim, seed=3).half(), *planes.args(), causal=False, device="cuda")
    # Rows that look at one key: its value has to survive beside one that is 6e8 times longer.
    decoded = reference.tbq4_dequantize(planes.k_codes, planes.k_norms).transpose(1, 2).flatten(0, 1)[:, 0]
    table, page_size = planes.block_table[0], planes.k_codes.shape[2]
    for key in (size[:, 0].argmin().item(), size[:, 0].argmax().item()):
        at = decoded[table[key // page_size] * page_size + key % page_size]
        q = (at * 200 / at.norm() ** 2 * head_dim**0.5).half().expand(1, 60, 4, head_dim)
        check_tbq4(q, *planes.args(), causal=False, device="cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_small_weights_beside_a_large_one(head_dim: int) -> None:
    """Weights of about 2^-23 of the last key's, which is read first, add up to 0.4 to 1.6 % of it."""
    length = 20000
    k, direction = randn(length, 1, head_dim), randn(1, head_dim, seed=2)
    v = direction + 0.1 * randn(length, 1, head_dim, seed=1)
    v[-1] = -direction
    planes = encode_pages(page_out([k], [v], 64))
    page = planes.block_table[0, (length - 1) // 64]
    last = reference.tbq4_dequantize(planes.k_codes[page, 0], planes.k_norms[page, 0])[(length - 1) % 64]
    q = (last * 16 / last.norm() ** 2 * head_dim**0.5).half().expand(1, 60, 4, head_dim)
    check_tbq4(q, *planes.args(), causal=False, device="cuda", big=True)


@pytest.mark.contract(7)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison_reaches_the_rows_that_see_it(head_dim: int, value: float) -> None:
    q = randn(1, 90, 4, head_dim, seed=3).half()
    args = page_out([randn(200, 1, head_dim)], [randn(200, 1, head_dim, seed=1)], 256)
    for plane in (1, 3):  # norms of K and V; query i sees keys 0 to 110 + i
        planes = list(encode_pages(args).args())
        planes[plane][planes[5][0, 0], 0, 170] = value
        out, lse = call("tbq4_attention", q, *planes, device="cuda", out_dtype=torch.float32)
        assert lse[:, :, :60].isfinite().all()
        assert lse[:, :, 60:].isfinite().all() == (plane == 3)
        assert out[:, 60:].isnan().all() if plane == 1 else not out[:, 60:].isfinite().any()
        assert out[:, :60].isfinite().all()
    q[0, 30, 2, 5] = value
    out, lse = call("tbq4_attention", q, *encode_pages(args).args(), device="cuda", out_dtype=torch.float32)
    assert out[0, 30, 2].isnan().all()
    out[0, 30, 2], lse[0, 2, 30] = 0, 0
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.contract(7)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("exact_last", [0, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison_in_a_value_leaves_rows_that_mask_it_as_they_are(head_dim: int, exact_last: int, value: float) -> None:
    """Of the queries of one tile some see the value, as a code or exactly. Of theirs, the other block has numbers."""
    cache = page_out([randn(200, 1, head_dim).half()], [randn(200, 1, head_dim, seed=1).half()], 256)
    planes = encode_pages(cache)
    pool = [cache.k, cache.v, cache.block_table] if exact_last else [None] * 3
    q = randn(1, 90, 4, head_dim, seed=3).half()  # query i sees keys 0 to 110 + i
    args = [q, *planes.args(), None, None, None, None, *pool]
    truth, true_lse = reference.tbq4_attention(*args, exact_last=exact_last, dtype=torch.float64)
    page = planes.block_table[0, 0]
    if exact_last:
        cache.v[page, 170, 0, 5] = value
    else:
        planes.v_norms[page, 0, 170, 0] = value
    out, lse = call("tbq4_attention", *args, device="cuda", exact_last=exact_last, out_dtype=torch.float32)
    width = tbq4.block_width(head_dim)
    assert not out[:, 60:, :, :width].isfinite().any()
    out[:, 60:, :, :width] = truth[:, 60:, :, :width]
    assert relative_l2(out, truth) <= 2e-3
    assert_lse(lse, true_lse, 2e-3)


@pytest.mark.contract(13)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_twice_the_same_bits(head_dim: int) -> None:
    case = CASES[0] | {"head_dim": head_dim, "kv_chunk": 0, "lengths": (5000, 700, 3000), "q_len": 90}
    args, options = build(case)
    results = [call("tbq4_attention", *args, device="cuda", **options) for _ in range(3)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.contract(2)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strides_of_queries_and_offsets_do_not_change_a_bit(head_dim: int) -> None:
    case = CASES[0] | {"head_dim": head_dim, "kv_chunk": 0, "offsets": "small", "layout": "contiguous"}
    args, options = build(case)
    expected = call("tbq4_attention", *args, device="cuda", **options)
    for i in (0, 10):
        moved = [lay_out(x, "padded") if j == i else x for j, x in enumerate(args)]
        assert all(map(torch.equal, call("tbq4_attention", *moved, device="cuda", **options), expected))


@pytest.mark.contract(9)
def test_pages_out_of_range_read_as_no_tokens() -> None:
    case = CASES[0] | {"lengths": (900, 600), "kv_chunk": 0, "exact": (0, 0), "page_size": 64, "sinks": "none"}
    args, options = build(case | {"mask": (True, -1), "kv_start": False, "offsets": "none", "holes": False})
    table = args[6].clone()
    table[0, 3], table[0, 7], table[1] = len(args[1]), -5, 2147480000
    whole = call("tbq4_attention", *args, device="cuda", out_dtype=torch.float32, **options)
    holes = call("tbq4_attention", *args[:6], table, *args[7:], device="cuda", out_dtype=torch.float32, **options)
    assert holes[0][0].isfinite().all()
    assert (holes[1][0] < whole[1][0]).all()
    assert (holes[0][1] == 0).all()
    assert (holes[1][1] == float("-inf")).all()


@pytest.mark.contract(12)
def test_memory_does_not_grow_with_the_context() -> None:
    q = torch.randn(1, 512, 8, 128, device="cuda").half()
    used = []
    for tokens in (1 << 14, 1 << 18):
        codes = torch.zeros(tokens // 64, 2, 64, 64, dtype=torch.uint8, device="cuda")
        norms = torch.ones(tokens // 64, 2, 64, 1, dtype=torch.float16, device="cuda")
        table = torch.arange(tokens // 64, dtype=torch.int32, device="cuda")[None]
        seqlens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = torch.ops.flashq.tbq4_attention(q, codes, norms, codes, norms, seqlens, table)
        used.append(torch.cuda.max_memory_allocated() - before)
        del result
    assert used[1] == used[0]
