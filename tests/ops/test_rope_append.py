"""tbq4_rope_append_: the reference's bits in the queries, the planes and the exact pool, and not one byte elsewhere."""

from __future__ import annotations

from typing import Any

import golden
import pytest
import torch
from cases import DTYPES, lay_out, move, randn
from torch import Tensor

import flashq
from flashq import reference, tbq4

Arguments = dict[str, Any]
WRITTEN = ("k_codes", "k_norms", "v_codes", "v_norms", "exact_k", "exact_v")


def make_planes(pages: int, heads: int, page_size: int, head_dim: int) -> Arguments:
    """Full of 255 and NaN."""
    blocks = head_dim // tbq4.block_width(head_dim)
    planes: Arguments = {}
    for name in "kv":
        planes[f"{name}_codes"] = torch.full((pages, heads, page_size, head_dim // 2), 255, dtype=torch.uint8)
        planes[f"{name}_norms"] = torch.full((pages, heads, page_size, blocks), float("nan")).half()
    return planes


def angles(rows: int, pairs: int, dtype: torch.dtype = torch.float32) -> Arguments:
    """The usual tables: position times 10000^(-i / pairs)."""
    angle = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def step(
    head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, *, tokens: int = 7, q_heads: int = 6, kv_heads: int = 2,
    rotary_dim: int | None = None, table_dtype: torch.dtype = torch.float32, index_dtype: torch.dtype = torch.int64,
    page_size: int = 16, seed: int = 0,
) -> Arguments:  # fmt: skip
    """A call with everything, on the CPU; some tokens are skipped, in the planes, in the pool, or in both."""
    heads = {"q": q_heads, "k": kv_heads, "v": kv_heads}
    call = {name: randn(tokens, n, head_dim, dtype=dtype, seed=seed + i) for i, (name, n) in enumerate(heads.items())}
    call |= angles(50, (rotary_dim or head_dim) // 2, table_dtype)
    random = torch.Generator().manual_seed(seed)
    call["positions"] = torch.randint(0, 50, (tokens,), generator=random).to(index_dtype)
    pages = -(-2 * tokens // page_size) + 1
    call |= make_planes(pages, kv_heads, page_size, head_dim)
    for name, capacity in (("slots", pages * page_size), ("exact_slots", 4 * tokens)):
        slots = torch.randperm(capacity, generator=random)[:tokens]
        slots[len(name) % 3 :: 3] = -1
        call[name] = slots.to(index_dtype)
    call["k_offsets"] = (3 * randn(pages, kv_heads, head_dim, seed=seed)).half()
    for name in ("exact_k", "exact_v"):
        call[name] = randn(tokens, 4, kv_heads, head_dim, dtype=dtype, seed=seed + 5)
    return call


def copy_of(call: Arguments) -> Arguments:
    return {name: x.clone() if name in WRITTEN and x is not None else x for name, x in call.items()}


def check(call: Arguments, device: torch.device | str, **options: Any) -> Tensor:
    """Runs the op on copies of the arguments, and holds it to the reference. Returns q."""
    ours, theirs = ({**copy_of(call), **options} for _ in range(2))
    ours = {name: move(x, device) for name, x in ours.items()}
    before = {name: ours[name].clone() for name in "qkv"}
    q = flashq.tbq4_rope_append_(**ours)
    expected = reference.tbq4_rope_append_(**theirs)
    assert golden.same_bits(q.cpu(), expected)
    assert q.is_contiguous()
    assert q.dtype == call["q"].dtype
    for name in WRITTEN:
        if theirs.get(name) is not None:
            assert golden.same_bits(ours[name].cpu(), theirs[name]), name
    assert all(torch.equal(ours[name], before[name]) for name in "qkv")
    return q.cpu()


@pytest.mark.contract(3, 9, 17)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_the_references_bits(head_dim: int, dtype: torch.dtype, interleaved: bool, backend: torch.device) -> None:
    """Whole heads, parts of them that vectors fit and that they don't, tables of both dtypes, optional arguments."""
    for rotary_dim in (head_dim, head_dim // 4, 48, 22, 2):
        for i, table_dtype in enumerate((torch.float32, dtype)):
            index_dtype = (torch.int32, torch.int64)[i]
            call = step(head_dim, dtype, rotary_dim=rotary_dim, table_dtype=table_dtype, index_dtype=index_dtype)
            check(call, backend, interleaved=interleaved)
            none = dict.fromkeys(("exact_k", "exact_v", "exact_slots"))
            check(call | none, backend, interleaved=interleaved)
            check(call | none | {"k_offsets": None}, backend, interleaved=interleaved)


@pytest.mark.contract(2)
@pytest.mark.parametrize("layout", ["heads_first", "padded", "spaced", "one_head"])
def test_any_strides(layout: str, backend: torch.device) -> None:
    for head_dim, interleaved in ((64, False), (128, True), (256, False)):
        call = step(head_dim, torch.float16)
        for names in (("q",), ("k",), ("v",), ("k_offsets",), ("exact_k",), ("exact_v",), ("q", "k", "v", "exact_k")):
            if layout == "one_head" and any(name in WRITTEN for name in names):
                continue
            check(call | {name: lay_out(call[name], layout) for name in names}, backend, interleaved=interleaved)
        both = torch.cat([call["cos"], call["sin"]], dim=1)  # one table, as some models keep them
        spread = {name: call[name].repeat_interleave(2)[::2] for name in ("positions", "slots", "exact_slots")}
        parts = {"cos": both[:, : head_dim // 2], "sin": both[:, head_dim // 2 :]}
        check(call | parts | spread, backend, interleaved=interleaved)
        fixed = {name: call[name][3:4].expand(50, -1) for name in ("cos", "sin")}
        check(call | fixed, backend, interleaved=interleaved)


@pytest.mark.contract(17)
@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads"), [(1, 8, 1), (1, 3, 3), (64, 35, 1), (700, 11, 3)])
def test_any_number_of_tokens_and_heads(tokens: int, q_heads: int, kv_heads: int, backend: torch.device) -> None:
    """Of many tokens, threads of a GPU turn several heads; how many does not divide these."""
    for head_dim in tbq4.HEAD_DIMS:
        for page_size in (1, 5):
            check(
                step(head_dim, tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, page_size=page_size),
                backend,
            )


@pytest.mark.contract(2, 9, 17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_prompts(head_dim: int, dtype: torch.dtype, backend: torch.device) -> None:
    """So many tokens that a GPU turns keys first: everything that a step may have."""
    for i, rotary_dim in enumerate((head_dim, 48, 22)):
        call = step(
            head_dim, dtype, tokens=1030, q_heads=10, kv_heads=2, rotary_dim=rotary_dim, index_dtype=torch.int32
        )
        check(call, backend, interleaved=i == 1)
        check(call | {"q": lay_out(call["q"], "padded"), "v": lay_out(call["v"], "heads_first")}, backend)
        check(call | {name: lay_out(call[name], "spaced") for name in ("q", "k")}, backend, interleaved=i == 0)
        check(call | dict.fromkeys(("k_offsets", "exact_k", "exact_v", "exact_slots")), backend)
    heads = {name: call[name][:, :0] for name in ("k", "v", "k_codes", "k_norms", "v_codes", "v_norms", "k_offsets")}
    heads |= {name: call[name][:, :, :0] for name in ("exact_k", "exact_v")}
    check(call | {name: x.contiguous() for name, x in heads.items()}, backend)
    assert check(call | {"q": call["q"][:, :0]}, backend).shape == (1030, 0, head_dim)


@pytest.mark.contract(14)
def test_empty_sizes(backend: torch.device) -> None:
    call = step()
    none = {name: call[name][:0] for name in ("q", "k", "v", "positions", "slots", "exact_slots")}
    assert check(call | none, backend).shape == (0, 6, 128)
    check(call | none | {name: call[name][:0] for name in ("cos", "sin")}, backend)
    assert check(call | {"q": call["q"][:, :0]}, backend).shape == (7, 0, 128)
    heads = {name: call[name][:, :0] for name in ("k", "v", "k_codes", "k_norms", "v_codes", "v_norms", "k_offsets")}
    heads |= {name: call[name][:, :, :0] for name in ("exact_k", "exact_v")}
    check(call | {name: x.contiguous() for name, x in heads.items()}, backend)
    skipped = torch.full((7,), -1)
    planes = {name: call[name][:0] for name in (*WRITTEN, "k_offsets")}
    check(call | planes | {"slots": skipped, "exact_slots": skipped}, backend)
    planes = {name: call[name][:, :, :0] for name in WRITTEN[:4]} | {name: call[name][:, :0] for name in WRITTEN[4:]}
    check(call | planes | {"slots": skipped, "exact_slots": skipped}, backend)


def half_split_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models do it, every operation in x's dtype."""
    cos, sin = (torch.cat([y, y], dim=-1)[:, None].to(x.dtype) for y in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


@pytest.mark.contract(17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_within_one_code_step_of_the_separate_ops(head_dim: int, dtype: torch.dtype, backend: torch.device) -> None:
    """A model rounds three times where this op does once; both turn, and then append, the same keys."""
    call = step(head_dim, dtype, tokens=40)
    slots, positions = torch.arange(40), call["positions"]
    planes = make_planes(3, 2, 16, head_dim)
    ours, theirs = (
        {name: x.clone().to(backend) for name, x in (planes | {"k_offsets": call["k_offsets"][:3]}).items()}
        for _ in range(2)
    )
    moved = {name: call[name].to(backend) for name in ("q", "k", "v", "cos", "sin", "positions")}
    q = flashq.tbq4_rope_append_(**moved, **ours, slots=slots.to(backend)).cpu().float()
    tables = call["cos"][positions], call["sin"][positions]
    k = half_split_rope(call["k"], *tables).to(backend)
    flashq.tbq4_append_(k, moved["v"], **theirs, slots=slots.to(backend))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(q, half_split_rope(call["q"], *tables).float(), rtol=2 * eps, atol=4 * eps)
    for name in "kv":
        codes = [x[f"{name}_codes"].cpu().int() for x in (ours, theirs)]
        for nibbles in ([x & 15 for x in codes], [x >> 4 for x in codes]):
            apart = (nibbles[0] - nibbles[1]).abs()
            assert apart.max() <= 1
            assert (apart > 0).float().mean() < 0.05
        norms = [x[f"{name}_norms"].cpu() for x in (ours, theirs)]
        # The outermost code, one step on, changes the energy by (2.73^2 - 2.07^2) / 64, so the norm by half of that.
        torch.testing.assert_close(*norms, rtol=0.025, atol=0, equal_nan=True)


@pytest.mark.contract(7, 9)
@pytest.mark.cuda
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_wild_indices_on_cuda(index_dtype: torch.dtype, head_dim: int, interleaved: bool) -> None:
    """A position outside of the tables gives NaN, and a slot outside of the cache writes nothing."""
    for rotary_dim in (head_dim, 22):
        call = step(head_dim, index_dtype=index_dtype, rotary_dim=rotary_dim)
        tame = check(call, "cpu", interleaved=interleaved)
        limits = torch.iinfo(index_dtype)
        wild = call | {name: call[name].clone() for name in ("positions", "slots", "exact_slots")}
        wild["positions"][[1, 3, 4, 6]] = torch.tensor([50, -1, limits.max, limits.min], dtype=index_dtype)
        wild["slots"][[2, 5]] = torch.tensor([len(call["k_codes"]) * 16, limits.max], dtype=index_dtype)
        wild["exact_slots"][[2, 5]] = torch.tensor([28, limits.max], dtype=index_dtype)
        ours = {name: x.cuda() for name, x in copy_of(wild).items()}
        q = flashq.tbq4_rope_append_(**ours, interleaved=interleaved).cpu()
        lost = [1, 3, 4, 6]
        assert q[lost][..., :rotary_dim].isnan().all()
        assert torch.equal(q[lost][..., rotary_dim:], call["q"][lost][..., rotary_dim:])
        assert torch.equal(q[[0, 2, 5]], tame[[0, 2, 5]])
        # What the reference makes of a position that has NaN in the tables, and of slots that it skips.
        theirs = copy_of(wild)
        for name in ("cos", "sin"):
            theirs[name] = torch.cat([theirs[name], torch.full((1, rotary_dim // 2), float("nan"))])
        theirs["positions"][lost] = 50
        for name in ("slots", "exact_slots"):
            theirs[name][[2, 5]] = -1
        reference.tbq4_rope_append_(**theirs, interleaved=interleaved)
        for name in WRITTEN:
            torch.testing.assert_close(ours[name].cpu(), theirs[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.contract(7)
def test_nan_stays_in_its_head(backend: torch.device) -> None:
    call = step(tokens=5)
    call["slots"], call["exact_slots"] = torch.arange(5), torch.arange(5)
    for name in "qkv":
        call[name][2, 1, 7] = float("nan")
    ours = {name: move(x, backend) for name, x in copy_of(call).items()}
    q = flashq.tbq4_rope_append_(**ours).cpu()
    touched = torch.zeros(5, 6, 128, dtype=torch.bool)
    touched[2, 1, [7, 7 + 64]] = True  # and what turns with it
    assert torch.equal(q.isnan(), touched)
    assert torch.equal(ours["exact_k"].cpu().flatten(0, 1)[:5].isnan(), touched[:, :2])
    for name in "kv":
        norms = ours[f"{name}_norms"].cpu()[0, :, :5, 0]
        assert torch.equal(norms.isnan().T, touched.any(-1)[:, :2])


@pytest.mark.contract(17)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_caches_step(page_size: int, backend: torch.device) -> None:
    """What TBQ4Cache writes in a decode step, by page offsets, this op and nothing else. Where a page's offset does not
    depend on keys of the step itself, keys that have not turned serve for it."""
    tables = angles(200, 32)

    def make_cache() -> flashq.TBQ4Cache:
        return flashq.TBQ4Cache(
            1, 2, 64, num_pages=400, page_size=page_size, max_sequences=2, dtype=torch.bfloat16, device=backend
        )

    ours, theirs = make_cache(), make_cache()
    for cache in (ours, theirs):
        prompts = cache.extend([cache.alloc(), cache.alloc(kv_start=3)], [30, 75])
        prompts.append(0, *(randn(105, 2, 64, dtype=torch.bfloat16, seed=i).to(backend) for i in range(2)))
    ops = torch.ops.flashq
    for t in range(40):  # the first sequence opens pages at 32, 48 and 64, the second at 80, 96 and 112
        q, k, v = (randn(2, n, 64, dtype=torch.bfloat16, seed=9 * t + n).to(backend) for n in (4, 2, 3))
        v, positions = v[:, :2], torch.tensor([30, 75], device=backend) + t
        turned = reference.tbq4_rope_append_(
            k.cpu(), k.cpu(), v.cpu(), **tables, positions=positions.cpu(), slots=torch.tensor([-1, -1]),
            **make_planes(1, 2, 1, 64),
        ).to(backend)  # fmt: skip
        theirs.extend([0, 1]).append(0, turned, v)
        (chunk,) = ours.extend([0, 1]).chunks
        p = ours._layer_planes[0]
        planes = {name: p[name] for name in ("k_codes", "k_norms", "v_codes", "v_norms", "k_offsets")}
        ops.tbq4_page_offsets_(
            k if page_size > 1 else turned, p["k_codes"], p["k_norms"], p["k_offsets"], chunk.seqlens,
            chunk.block_tables[0], chunk.cu_seqlens, chunk.kv_start, p["exact_k"], chunk.block_tables[1],
        )  # fmt: skip
        ops.tbq4_rope_append_(
            q, k, v, *(x.to(backend) for x in tables.values()), positions, **planes, slots=chunk.slots[0],
            exact_k=p["exact_k"], exact_v=p["exact_v"], exact_slots=chunk.slots[1],
        )  # fmt: skip
    for name, x in ours._layer_planes[0].items():
        assert golden.same_bits(x.cpu(), theirs._layer_planes[0][name].cpu()), name
    attended = [cache.lookup([0, 1]).attend(0, q) for cache in (ours, theirs)]
    assert all(map(torch.equal, *attended))


@pytest.mark.cuda
def test_opcheck_on_cuda() -> None:
    call = {name: x.nan_to_num().cuda() if x.is_floating_point() else x.cuda() for name, x in step().items()}
    torch.library.opcheck(torch.ops.flashq.tbq4_rope_append_.default, (), call)
