"""Every argument of every op, given wrongly: an exception that names the op and the argument, and says what was
expected and what came. No file names, no crash."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from arguments import HKV, HQ, INDEX_VALUES, B, D, L, N, S, bad, good

import flashq
from flashq import _register

NAN = float("nan")

ALL_NAMES = {
    op: [argument.name for argument in getattr(torch.ops.flashq, op).default._schema.arguments] for op in _register.OPS
}
TENSORS = [(op, name) for op in _register.OPS for name in good(op) if isinstance(good(op)[name], torch.Tensor)]


def refused(op: str, argument: str, expected: str, got: str, **changes: Any) -> str:
    """The op refuses, naming the argument and matching both texts (regular expressions)."""
    arguments = good(op) | changes
    pattern = rf"^flashq::{op}: {argument}(\[[\d, ]+\])?: expected .*{expected}.*, got .*{got}"
    with pytest.raises(RuntimeError) as caught:
        getattr(flashq, op)(**arguments)
    message = str(caught.value).splitlines()[0]
    assert re.search(pattern, message), f"{message!r} does not match {pattern!r}"
    assert not re.search(r"\.(cpp|h|cu|py)\b|\w/\w", str(caught.value)), "a file name in the message"
    return message


@pytest.mark.contract(16)
@pytest.mark.parametrize("op", _register.OPS)
def test_the_good_arguments_are_accepted(op: str) -> None:
    getattr(flashq, op)(**good(op))


@pytest.mark.contract(16)
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_rank(op: str, name: str) -> None:
    tensor = good(op)[name]
    wrong = [torch.zeros((), dtype=tensor.dtype)]
    if name != "x" and name != "codes":  # any leading dimensions are right
        wrong.append(tensor[None, None])
    for t in wrong:
        refused(op, name, r"(shape|dimensions)", re.escape(str(tuple(t.shape)).rstrip(")").rstrip(",")), **{name: t})


@pytest.mark.contract(3, 9, 16)
@pytest.mark.parametrize(("op", "name"), TENSORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    tensor = good(op)[name]
    leaders = {"q", "k", "x", "outs", "codes"}
    expected = "torch"
    if name not in leaders and not tensor.is_floating_point() and tensor.dtype == torch.int64:
        expected = "torch.int32 or torch.int64"
    refused(op, name, expected, str(dtype), **{name: tensor.to(dtype)})


@pytest.mark.contract(3)
@pytest.mark.parametrize(
    ("op", "name"),
    [(op, n) for op, n in TENSORS if n in ("k", "v", "k_cache", "v_cache", "exact_k", "exact_v") and n != "k"]
    + [("prefill", "k"), ("prefill_varlen", "k")],
)
def test_one_dtype_for_queries_keys_and_values(op: str, name: str) -> None:
    refused(op, name, "torch.bfloat16", "torch.float16", **{name: good(op)[name].half()})


@pytest.mark.contract(2)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, n)
        for op, n in TENSORS
        if n not in ("sinks", "seqlens", "kv_start", "slots", "exact_slots", "positions") and "cu_" not in n
    ],
)
def test_last_stride(op: str, name: str) -> None:
    tensor = good(op)[name]
    if "table" in name or name == "lses":
        getattr(flashq, op)(**(good(op) | {name: tensor.repeat_interleave(2, dim=-1)[..., ::2]}))  # any strides
        return
    if name.endswith("norms") and "k_codes" in good(op):  # (..., 1): spread along the pages
        spread = tensor.repeat_interleave(2, dim=0)[::2]
    elif tensor.shape[-1] == 1:
        return
    else:
        spread = tensor.repeat_interleave(2, dim=-1)[..., ::2]
    assert not spread.is_contiguous()
    refused(op, name, "stride|contiguous", re.escape(f"strides {tuple(spread.stride())}"), **{name: spread})


@pytest.mark.contract(2)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, n)
        for op, n in TENSORS
        if op in ("tbq4_attention", "tbq4_append_", "tbq4_rope_append_", "tbq4_page_offsets_")
        and n[1:] in ("_codes", "_norms")
    ],
)
def test_planes_are_contiguous(op: str, name: str) -> None:
    spread = good(op)[name].repeat_interleave(2, dim=0)[::2]
    refused(op, name, "contiguous", re.escape(f"strides {tuple(spread.stride())}"), **{name: spread})


@pytest.mark.contract(16)
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_sizes(op: str, name: str) -> None:
    """One dimension at a time, one too many; those that lead are free, so another tensor is named then."""
    tensor = good(op)[name]
    for dim in range(tensor.dim()):
        size = list(tensor.shape)
        size[dim] += 1
        wrong = tensor.new_zeros(size)
        free = (
            (name in ("x", "codes") and dim < tensor.dim() - 1)
            or ("table" in name and dim == 1)
            or (name in ("cu_seqlens_q", "cu_seqlens_k"))
            or (op == "tbq4_page_offsets_" and name == "exact_k" and dim < 2)
            or (op in ("prefill_varlen",) and name in ("q",) and dim == 0)
            or (name in ("q", "outs") or (name in ("k", "x") and dim < tensor.dim() - 1))
        )
        arguments = good(op) | {name: wrong}
        if not free:
            with pytest.raises(RuntimeError, match=rf"^flashq::{op}: \w+(\[\d\])?: expected .*, got "):
                getattr(flashq, op)(**arguments)


@pytest.mark.contract(3)
@pytest.mark.parametrize("head_dim", [12, 264, 4, 0])
def test_head_dim_of_attention(head_dim: int) -> None:
    q, kv = torch.zeros(B, S, HQ, head_dim), torch.zeros(B, L, HKV, head_dim)
    refused("prefill", "q", "multiple of 8 from 8 to 256", f"head_dim {head_dim}", q=q, k=kv, v=kv)


@pytest.mark.contract(3)
@pytest.mark.parametrize("head_dim", [8, 80, 96, 112, 192, 512])
def test_head_dim_of_tbq4(head_dim: int) -> None:
    for op in ("tbq4_quantize", "tbq4_rotate"):
        refused(op, "x", "64, 128 or 256", f"head_dim {head_dim}", x=torch.zeros(3, head_dim))
    refused("tbq4_dequantize", "codes", "64, 128 or 256", f"head_dim {head_dim}",
            codes=torch.zeros(3, head_dim // 2, dtype=torch.uint8))  # fmt: skip
    refused("tbq4_append_", "k", "64, 128 or 256", f"head_dim {head_dim}",
            k=torch.zeros(N, HKV, head_dim), v=torch.zeros(N, HKV, head_dim))  # fmt: skip
    refused("tbq4_page_offsets_", "k", "64, 128 or 256", f"head_dim {head_dim}", k=torch.zeros(N, HKV, head_dim))
    refused("tbq4_rope_append_", "q", "64, 128 or 256", f"head_dim {head_dim}", q=torch.zeros(N, HQ, head_dim))
    q = torch.zeros(B, S, HQ, head_dim)
    refused("tbq4_attention", "q", "(64, 128 or 256|from 8 to 256)", f"head_dim {head_dim}", q=q)


@pytest.mark.contract(3)
def test_head_dim_of_v_is_that_of_q() -> None:
    for op, name in (("prefill", "v"), ("prefill_varlen", "v"), ("decode", "v_cache"), ("tbq4_attention", "exact_v")):
        for head_dim in (32, 128):
            wrong = good(op)[name].new_zeros(*good(op)[name].shape[:-1], head_dim)
            refused(op, name, "head_dim 64", f"head_dim {head_dim}", **{name: wrong})


@pytest.mark.contract(3, 16)
def test_rotary_tables() -> None:
    """Of one shape, of one dtype, which is fp32 or that of q, for at least one pair and no more than a head has."""
    tables = good("tbq4_rope_append_")
    for columns in (0, D // 2 + 1):
        wrong = torch.zeros(L, columns)
        refused("tbq4_rope_append_", "cos", f"from 1 to {D // 2} columns", rf"\({L}, {columns}\)", cos=wrong, sin=wrong)
    refused("tbq4_rope_append_", "sin", f"max_position = {L}", f"{L - 1}", sin=tables["sin"][1:])
    refused("tbq4_rope_append_", "sin", "torch.float32, as cos has", "torch.bfloat16", sin=tables["sin"].bfloat16())
    half = {name: tables[name].half() for name in ("cos", "sin")}
    refused("tbq4_rope_append_", "cos", "torch.float32 or torch.bfloat16", "torch.float16", **half)


@pytest.mark.contract(4)
def test_heads_do_not_divide() -> None:
    refused("prefill", "q", "multiple of the 2 KV heads", "3 heads", q=torch.zeros(B, S, 3, D).bfloat16(), sinks=None)
    refused("decode", "q", "multiple of the 2 KV heads", "5 heads", q=torch.zeros(B, S, 5, D).bfloat16(), sinks=None)
    refused("tbq4_attention", "q", "multiple of the 2 KV heads", "1 heads", q=torch.zeros(B, S, 1, D), sinks=None)
    for op in ("prefill", "decode", "tbq4_attention"):  # and no option to read the cache once a query head
        assert not {"gqa", "enable_gqa", "pack_gqa"} & set(ALL_NAMES[op])


OPTIONS: list[tuple[str, float, str]] = [
    ("scale", NAN, "finite"),
    ("scale", float("inf"), "finite"),
    ("softcap", -1.5, "at least 0"),
    ("softcap", NAN, "at least 0"),
    ("window_left", -2, "at least -1"),
    ("window_right", -2, "at least -1"),
    ("max_seqlen_q", -1, "at least 0"),
    ("max_seqlen_k", -1, "at least 0"),
    ("exact_first", -1, "at least 0"),
    ("exact_last", -1, "at least 0"),
    ("kv_chunk", 128, "multiple of 64 of at least 256"),
    ("kv_chunk", 300, "multiple of 64 of at least 256"),
    ("kv_chunk", -256, "multiple of 64 of at least 256"),
    ("out_dtype", torch.float16, "None"),
    ("out_dtype", torch.float64, "None"),
    ("dtype", torch.int32, "None"),
    ("dtype", torch.float64, "None"),
]


@pytest.mark.contract(1, 5, 16)
@pytest.mark.parametrize(
    ("op", "option", "value", "expected"),
    [(op, *option) for op in _register.OPS for option in OPTIONS if option[0] in ALL_NAMES[op]],
)
def test_options(op: str, option: str, value: float, expected: str) -> None:
    refused(op, option, expected, re.escape(str(value)), **{option: value})


OPTIONAL = {"block_table", "kv_start", "sinks", "k_offsets", "exact_k", "exact_v", "exact_block_table", "exact_slots"}


@pytest.mark.contract(16)
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in TENSORS if name not in {"x", *OPTIONAL}])
def test_none_for_a_tensor(op: str, name: str) -> None:
    refused(op, name, "a tensor", "None", **{name: None})


@pytest.mark.contract(9, 16)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("op", "name", "values", "expected", "got"), INDEX_VALUES)
def test_index_values(op: str, name: str, values: list, expected: str, got: str, index_dtype: torch.dtype) -> None:
    refused(op, name, expected, got, **bad(op, name, values, index_dtype))


def test_cu_seqlens_of_as_many_sequences() -> None:
    refused("prefill_varlen", "cu_seqlens_k", "as many", r"\(2,\)", cu_seqlens_k=torch.tensor([0, L]))


@pytest.mark.contract(9)
def test_a_cache_without_a_table_has_a_page_a_sequence() -> None:
    cache = good("decode")["k_cache"][:1]
    refused("decode", "k_cache", "page a sequence", "1 pages", block_table=None, k_cache=cache, v_cache=cache)
    short = torch.tensor([N, N + 1])
    refused("decode", "seqlens", f"capacity of {N}", str(N + 1), block_table=None, seqlens=short, kv_start=None)


@pytest.mark.contract(9, 14)
@pytest.mark.parametrize("op", ["decode", "tbq4_attention", "tbq4_page_offsets_"])
def test_a_table_of_no_columns_has_room_for_no_token(op: str) -> None:
    table = torch.zeros(B, 0, dtype=torch.int32)
    refused(op, "seqlens", "capacity of 0", str(L), block_table=table, kv_start=None)


def test_packed_queries_and_their_starts() -> None:
    for op in ("decode", "tbq4_attention"):
        packed = good(op)["q"].flatten(0, 1)
        refused(op, "q", r"\(B, Sq, Hq, D\)", r"\(6, 4, 64\)", q=packed)
        refused(op, "q", r"\(Tq, Hq, D\)", r"\(2, 3, 4, 64\)", cu_seqlens_q=torch.tensor([0, 3, 6]))
        refused(op, "cu_seqlens_q", "to 6", "7", q=packed, cu_seqlens_q=torch.tensor([0, 3, 7]))


def test_exact_tokens_need_the_whole_pool() -> None:
    for name in ("exact_k", "exact_v", "exact_block_table"):
        refused("tbq4_attention", name, "together", "None", **{name: None})
    for name in ("exact_k", "exact_block_table"):
        refused("tbq4_page_offsets_", name, "together", "None", **{name: None})
    for name in ("exact_k", "exact_v", "exact_slots"):
        refused("tbq4_rope_append_", name, "together", "None", **{name: None})
    nothing = {"exact_k": None, "exact_v": None, "exact_block_table": None}
    refused("tbq4_attention", "exact_k", "all three", "None", **nothing)
    flashq.tbq4_attention(**(good("tbq4_attention") | nothing | {"exact_first": 0, "exact_last": 0}))


@pytest.mark.contract(9, 16)
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_another_device(op: str, name: str) -> None:
    """A meta tensor among real ones has no memory to read: refused by name, never a crash."""
    wrong = good(op) | {name: good(op)[name].to("meta")}
    if sum(isinstance(value, torch.Tensor) for value in wrong.values()) == 1:
        assert all(x.is_meta for x in torch.utils._pytree.tree_leaves(getattr(flashq, op)(**wrong)))  # shapes alone
        return
    with pytest.raises(
        RuntimeError, match=rf"^flashq::{op}: \w+: expected a tensor on \w+, where \w+ is, got (meta|cpu)"
    ):
        getattr(flashq, op)(**wrong)


@pytest.mark.contract(16)
@pytest.mark.parametrize("op", _register.OPS)
def test_python_functions_have_the_schemas_names_and_defaults(op: str) -> None:
    parameters = inspect.signature(getattr(flashq, op)).parameters
    assert list(parameters) == ALL_NAMES[op]
    for argument in getattr(torch.ops.flashq, op).default._schema.arguments:
        parameter = parameters[argument.name]
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert parameter.default == default
        assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only
    eager = inspect.signature(getattr(flashq.reference, op)).parameters
    assert [name for name in eager if name not in ("dtype", "stats")] == [n for n in ALL_NAMES[op] if n != "dtype"]
