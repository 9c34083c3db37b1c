"""tbq4_attention against eager attention over the decoded cache: offsets, exact tokens, poison."""

from __future__ import annotations

from collections.abc import Callable

import golden
import pytest
import torch
from accuracy import assert_lse, check_tbq4, relative_l2
from cases import (
    DTYPES,
    GARBAGE_PAGES,
    GROUPS,
    PAGE_SIZES,
    SCALES,
    SINKS,
    Planes,
    call,
    case_id,
    encode_pages,
    everywhere,
    first_visible,
    lay_out,
    make_sinks,
    page_out,
    pairwise,
    plain_dtype,
    randn,
    with_cuda,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import flashq
from flashq import reference
from flashq.cli.machine import cpu_levels

ISAS = cpu_levels().available
INDEX_DTYPES = (torch.int32, torch.int64)


@pytest.mark.contract(17)
@everywhere(op=["tbq4_attention"], dtype=DTYPES, group=golden.ATTENTION_GROUPS)
def test_golden_vectors(op: str, group: str, dtype: torch.dtype, backend: torch.device) -> None:
    data = golden.load(group)
    out, lse = call(
        op,
        data["q"].to(dtype),  # exact in 16 bits
        *(data[name] for name in ("k_codes", "k_norms", "v_codes", "v_norms", "seqlens", "block_table")),
        scale=data["scale"].item(),
        causal=bool(data["causal"]),
        out_dtype=torch.float32,
        device=backend,
    )
    assert relative_l2(out, data["out"]) <= 2e-3
    assert_lse(lse, data["lse"], 2e-3)


class Exact:
    """An exact pool for sequences of (L, Hkv, D): keys, values, its table; poisoned as `page_out` does."""

    def __init__(
        self, keys: list, values: list, page_size: int, *, first: int, last: int, q_len: int, start: list[int] | None,
        holes: bool, layout: str, index_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        pool = page_out(keys, values, page_size, index_dtype=index_dtype, layout="contiguous", seed=5)
        table = pool.block_table.clone()
        for b, k in enumerate(keys):
            low, length = start[b] if start else 0, len(k)
            read = torch.zeros(table.shape[1] * page_size, dtype=torch.bool)
            read[low : min(low + first, length)] = True
            if last:
                read[max(low, length - q_len - last + 1) : length] = True
            for i in range(table.shape[1]):
                page, tokens = int(table[b, i]), slice(i * page_size, (i + 1) * page_size)
                if not read[tokens].any() or (holes and i % 2):
                    table[b, i] = GARBAGE_PAGES[i % 2]
                elif 0 <= page < len(pool.k):
                    for cache in pool[:2]:  # what no query reads exactly is poison
                        cache[page, ~read[tokens]] = float("nan")
        self.k, self.v, self.table = lay_out(pool.k, layout), lay_out(pool.v, layout), table
        self.first, self.last, self.q_len, self.start = first, last, q_len, start

    def read_by_all(self, sequence: int, length: int, causal: bool, window_left: int) -> torch.Tensor:
        """Bool (length): the tokens that every query sees and reads from here."""
        start = self.start[sequence] if self.start else 0
        visible = reference.visible_keys(self.q_len, length, kv_start=start, causal=causal, window_left=window_left)
        key, position = torch.arange(length), torch.arange(self.q_len)[:, None] + (length - self.q_len)
        chosen = (key < start + self.first) | ((self.last > 0) & (key > position - self.last))
        page = self.table[sequence].long()[key // self.k.shape[1]]
        return (visible & chosen & (page >= 0) & (page < len(self.k))).all(0) & (self.q_len > 0)


def poison_exact_tokens(planes: Planes, sequence: int, tokens: torch.Tensor) -> None:
    """Nobody may look at the codes of these tokens (bool) of a sequence."""
    page_size = planes.k_codes.shape[2]
    for t in tokens.nonzero()[:, 0].tolist():
        page = planes.block_table[sequence, t // page_size]
        if page not in GARBAGE_PAGES:
            planes.k_codes[page, :, t % page_size] = planes.v_codes[page, :, t % page_size] = 255
            planes.k_norms[page, :, t % page_size] = planes.v_norms[page, :, t % page_size] = float("nan")


_CASES = {
    "head_dim": (64, 128, 256),
    "group": GROUPS,
    "q_len": (1, 2, 5, 16, 17, 0),
    "lengths": ((300, 1, 64), (17, 0, 130), (600, 33, 5), (63, 65, 257)),
    "page_size": PAGE_SIZES,
    "mask": ((True, -1), (False, -1), (True, 40), (True, 0)),
    "kv_start": (False, True),
    "offsets": ("none", "small", "large", "strided"),
    "exact": ((0, 0), (4, 64), (0, 20), (5, 0), (4, 1000)),
    "exact_page": (16, 1, 64),
    "holes": (False, True),
    "softcap": (0.0, 15.0),
    "sinks": SINKS,
    "scale": SCALES,
    "kv_chunk": (0, 256, 320),
    "index_dtype": INDEX_DTYPES,
    "layout": ("contiguous", "heads_first", "padded"),
    "threads": (2, 1, 3),
}
CASES = with_cuda(
    pairwise(backend=ISAS, dtype=DTYPES, **_CASES),
    dtype=DTYPES[1:],
    **_CASES | {"threads": (1,)},
)


def build(case: dict) -> tuple[list[torch.Tensor | None], dict]:
    """Arguments and options of tbq4_attention for a case."""
    kv_heads, dim, lengths = 1 if case["group"] > 8 else 2, case["head_dim"], case["lengths"]
    heads, dtype, index_dtype, q_len = kv_heads * case["group"], case["dtype"], case["index_dtype"], case["q_len"]
    start = [n // 3 for n in lengths] if case["kv_start"] else None
    bias = 30.0 if case["offsets"] == "large" else 0.5
    direction = randn(kv_heads, dim, seed=77)
    keys = [(randn(n, kv_heads, dim, seed=i) + bias * direction).to(dtype) for i, n in enumerate(lengths)]
    values = [randn(n, kv_heads, dim, dtype=dtype, seed=11 + i) for i, n in enumerate(lengths)]
    causal, left = case["mask"]
    first_seen = [first_visible(n, q_len, start[b] if start else 0, left) for b, n in enumerate(lengths)]
    cache = page_out(keys, values, case["page_size"], index_dtype=index_dtype, kv_start=start, first_seen=first_seen)
    offsets = None
    if case["offsets"] != "none":
        offsets = (bias * direction + 0.1 * randn(len(cache.k), kv_heads, dim, seed=78)).half()
        owned = (~cache.k.isnan()).flatten(1).any(1)
        offsets[~owned] = float("nan")
        if case["offsets"] == "strided":
            offsets = lay_out(offsets, "padded")
    planes = encode_pages(cache, offsets)
    first, last = case["exact"]
    exact: list[torch.Tensor | None] = [None, None, None]
    if first or last:
        pool = Exact(
            keys, values, case["exact_page"], first=first, last=last, q_len=q_len, start=start, holes=case["holes"],
            layout=case["layout"], index_dtype=index_dtype,
        )  # fmt: skip
        exact = [pool.k, pool.v, pool.table]
        for b, length in enumerate(lengths):
            poison_exact_tokens(planes, b, pool.read_by_all(b, length, causal, left))
    args = [
        lay_out(randn(len(lengths), q_len, heads, dim, dtype=dtype, seed=21), case["layout"]),
        *planes.args(),
        None,
        None if start is None else torch.tensor(start, dtype=index_dtype),
        make_sinks(case["sinks"], heads),
        offsets,
        *exact,
    ]
    options = {name: case[name] for name in ("scale", "softcap", "kv_chunk")}
    options |= {"causal": case["mask"][0], "window_left": case["mask"][1]}
    return args, options | {"exact_first": first, "exact_last": last}


@pytest.mark.contract(1, 2, 3, 4, 5, 6, 8, 9, 10, 17)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tbq4_attention(case: dict, enter_backend: Callable[[str], torch.device]) -> None:
    device = enter_backend(case["backend"])
    args, options = build(case)
    out, lse = check_tbq4(*args, device=device, threads=case["threads"], **options)
    # In the query's dtype: the same up to the rounding of the output.
    rounded, same_lse = call("tbq4_attention", *args, device=device, **options)
    assert rounded.dtype == case["dtype"]
    torch.testing.assert_close(rounded.float(), out, rtol=torch.finfo(case["dtype"]).eps, atol=1e-6)
    assert golden.same_bits(same_lse, lse)


@pytest.mark.contract(4)
@pytest.mark.parametrize("group", [128, 131])
@pytest.mark.parametrize("q_len", [1, 3])
def test_many_query_heads_a_kv_head(group: int, q_len: int, backend: torch.device) -> None:
    planes = encode_pages(page_out([randn(70, 1, 64)], [randn(70, 1, 64, seed=1)], 16))
    q = randn(1, q_len, group, 64, dtype=plain_dtype(backend), seed=2)
    check_tbq4(q, *planes.args(), device=backend)


@pytest.mark.contract(9)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("q_lengths", [(1, 1, 1), (5, 0, 2), (16, 1, 33), (0, 0, 0)])
def test_packed_queries(q_lengths: tuple[int, ...], index_dtype: torch.dtype, backend: torch.device) -> None:
    lengths, tail = (300, 17, 90), 3
    keys, values = ([randn(n, 2, 64, seed=s + i) for i, n in enumerate(lengths)] for s in (1, 11))
    planes = encode_pages(page_out(keys, values, 16, index_dtype=index_dtype))
    cu_q = torch.tensor([0, *q_lengths], dtype=index_dtype).cumsum(0, dtype=index_dtype)
    q = randn(int(cu_q[-1]) + tail, 4, 64, dtype=plain_dtype(backend))
    start = torch.tensor([3, 17, 0], dtype=index_dtype)
    out, lse = check_tbq4(q, *planes.args(), cu_q, start, window_left=50, device=backend)
    assert torch.equal(out[-tail:], torch.zeros_like(out[-tail:]))
    assert (lse[:, -tail:] == float("-inf")).all()


@pytest.mark.contract(1)
def test_offset_scores_keep_fp32_precision(backend: torch.device) -> None:
    """Keys around a vector of norm 800: scores of thousands, whose differences decide. A rounded offset moves them."""
    direction = randn(1, 128)
    direction *= 800 / direction.norm()
    keys = [(randn(200, 1, 128, seed=1) + direction).half()]
    cache = page_out(keys, [randn(200, 1, 128, seed=2).half()], 64)
    offsets = direction.half().expand(len(cache.k), 1, 128)
    planes = encode_pages(cache, offsets)
    for dtype in DTYPES if backend.type == "cpu" else DTYPES[1:]:
        q = (randn(1, 2, 4, 128, seed=3) + direction / 50).to(dtype)
        check_tbq4(q, *planes.args(), None, None, None, offsets, scale=1.0, device=backend)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=3).map(tuple),
    q_len=st.integers(0, 20),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([64, 128, 256]),
    page_size=st.integers(1, 300),
    exact_page=st.integers(1, 70),
    exact=st.tuples(st.integers(0, 9), st.integers(0, 100)),
    holes=st.booleans(),
    causal=st.booleans(),
    left=st.integers(-1, 90),
    kv_start=st.booleans(),
    offsets=st.sampled_from(["none", "large"]),
)
def test_tbq4_attention_of_any_size(causal: bool, left: int, **case: object) -> None:
    fixed = {"sinks": "none", "scale": None, "softcap": 0.0, "kv_chunk": 0, "layout": "contiguous"}
    args, options = build(fixed | case | {"mask": (causal, left), "index_dtype": torch.int64})
    check_tbq4(*args, **options)


@pytest.mark.contract(8, 9)
@pytest.mark.parametrize("window_left", [-1, 7])
def test_pages_that_every_query_reads_exactly_need_no_page_of_codes(window_left: int, isa: str) -> None:
    """Their table entries may hold anything. An entry that some query needs for codes has to be a page."""
    length, page_size, q = 96, 16, randn(1, 2, 4, 64, seed=2)
    cache = page_out([randn(length, 2, 64)], [randn(length, 2, 64, seed=1)], page_size)
    pool, planes = cache.k, encode_pages(cache)

    def attend(spoilt: list[int], exact_table: torch.Tensor = cache.block_table) -> list[torch.Tensor]:
        table = cache.block_table.clone()
        table[0, spoilt] = 2147480000
        return list(
            flashq.tbq4_attention(
                q, *planes[:4], planes.seqlens, table, exact_k=pool, exact_v=cache.v, exact_block_table=exact_table,
                exact_first=16, exact_last=17, window_left=window_left,
            )
        )  # fmt: skip

    needless = [0, 5] if window_left < 0 else [0, 1, 2, 3, 4, 5]  # the window ends among the recent tokens
    assert all(map(torch.equal, attend(needless), attend([])))
    if window_left < 0:
        for entry in (1, 4):  # the last query reads tokens 16 to 78 from codes
            with pytest.raises(RuntimeError, match=rf"block_table\[0, {entry}\]: expected a page from 0"):
                attend([entry])
    holes = cache.block_table.clone()
    holes[0, 5] = -1
    with pytest.raises(RuntimeError, match=r"block_table\[0, 5\]: expected a page from 0"):
        attend([5], holes)


@pytest.mark.contract(13)
def test_chunked_prompts_give_the_same_rows(isa: str) -> None:
    """The same planes and exact pool, read by a prompt at once or in chunks: the same rows up to rounding."""
    case = {
        "group": 3, "head_dim": 128, "lengths": (150,), "dtype": torch.float32, "index_dtype": torch.int32,
        "q_len": 150, "kv_start": False, "offsets": "small", "page_size": 16, "exact": (4, 20), "exact_page": 16,
        "layout": "contiguous", "sinks": "none", "scale": None, "softcap": 0.0, "kv_chunk": 0, "mask": (True, -1),
        "holes": False,
    }  # fmt: skip
    args, options = build(case)
    options["out_dtype"] = torch.float32
    whole, whole_lse = flashq.tbq4_attention(*args, **options)
    truth, _ = reference.tbq4_attention(*args, **options)
    for chunk in (1, 7, 64):
        for begin in range(0, 150, chunk):
            end = min(begin + chunk, 150)
            part = list(args)
            part[0], part[5] = args[0][:, begin:end], torch.tensor([end], dtype=torch.int32)
            out, lse = flashq.tbq4_attention(*part, **options)
            torch.testing.assert_close(out, whole[:, begin:end], rtol=0, atol=2e-3 * truth.abs().max().item())
            torch.testing.assert_close(lse, whole_lse[..., begin:end], rtol=0, atol=2e-3)


@pytest.mark.contract(2)
def test_copy_on_write_planes_stay_shared() -> None:
    planes = [torch._lazy_clone(x) for _ in range(2) for x in flashq.tbq4_quantize(torch.randn(1, 2, 8, 64))]
    flashq.tbq4_attention(torch.randn(1, 1, 2, 64), *planes, torch.tensor([8]))
    assert all(torch._C._is_cow_tensor(x) for x in planes)
