"""What the C++ ops need from Python: fake rules for tracing, the refusal of gradients, versions of mutated tensors.

Importing this module registers both. It needs libflashq.so to be loaded, because the schemas come from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from flashq.tbq4 import HEAD_DIMS, block_width

OPS = (
    "prefill",
    "prefill_varlen",
    "decode",
    "kv_append_",
    "tbq4_quantize",
    "tbq4_dequantize",
    "tbq4_rotate",
    "tbq4_append_",
    "tbq4_rope_append_",
    "tbq4_page_offsets_",
    "tbq4_attention",
    "merge_states",
)


# --- fake rules: shapes, dtypes and strides of the outputs. They check what those need; the op checks the rest. ------


def _expect_dims(op: str, name: str, tensor: Tensor, dims: int, shape: str) -> None:
    if tensor.dim() != dims:
        raise RuntimeError(f"flashq::{op}: {name}: expected {dims} dimensions {shape}, got shape {tuple(tensor.shape)}")


def _expect_tbq4_head_dim(op: str, name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise RuntimeError(f"flashq::{op}: {name}: expected head_dim 64, 128 or 256, got {head_dim}")


def _attention_outputs(q: Tensor, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """q (..., S, Hq, D) -> out of its shape, lse fp32 (..., Hq, S), both contiguous."""
    *batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape, dtype=out_dtype or q.dtype), q.new_empty((*batch, heads, tokens), dtype=torch.float32)


def _fake_prefill(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    _expect_dims("prefill", "q", q, 4, "(B, Sq, Hq, D)")
    return _attention_outputs(q)


def _fake_prefill_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _expect_dims("prefill_varlen", "q", q, 3, "(Tq, Hq, D)")
    return _attention_outputs(q)


def _expect_cached_queries(op: str, q: Tensor, cu_seqlens_q: Tensor | None) -> None:
    if cu_seqlens_q is None:
        _expect_dims(op, "q", q, 4, "(B, Sq, Hq, D)")
    else:
        _expect_dims(op, "q", q, 3, "(Tq, Hq, D)")


def _fake_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_start: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _expect_cached_queries("decode", q, cu_seqlens_q)
    return _attention_outputs(q, out_dtype)


def _fake_tbq4_attention(
    q: Tensor,
    k_codes: Tensor,
    k_norms: Tensor,
    v_codes: Tensor,
    v_norms: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *more: Tensor | None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _expect_cached_queries("tbq4_attention", q, cu_seqlens_q)
    return _attention_outputs(q, out_dtype)


def _fake_in_place(*tensors: Tensor | None) -> None:
    """kv_append_, tbq4_append_ and tbq4_page_offsets_ write into their arguments and return nothing."""


def _fake_tbq4_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = x.shape[-1] if x.dim() else 0
    _expect_tbq4_head_dim("tbq4_quantize", "x", head_dim)
    leading = x.shape[:-1]
    codes = x.new_empty((*leading, head_dim // 2), dtype=torch.uint8)
    return codes, x.new_empty((*leading, head_dim // block_width(head_dim)), dtype=torch.float16)


def _fake_tbq4_dequantize(codes: Tensor, norms: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    head_dim = 2 * codes.shape[-1] if codes.dim() else 0
    _expect_tbq4_head_dim("tbq4_dequantize", "codes", head_dim)
    return codes.new_empty((*codes.shape[:-1], head_dim), dtype=dtype or torch.float32)


def _fake_tbq4_rotate(x: Tensor, *, inverse: bool = False) -> Tensor:
    _expect_tbq4_head_dim("tbq4_rotate", "x", x.shape[-1] if x.dim() else 0)
    return x.new_empty(x.shape)


def _fake_tbq4_rope_append(q: Tensor, *more: Tensor | None, interleaved: bool = False) -> Tensor:
    _expect_dims("tbq4_rope_append_", "q", q, 3, "(T, Hq, D)")
    return q.new_empty(q.shape)


def _fake_merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if outs.dim() not in (4, 5):
        raise RuntimeError(
            "flashq::merge_states: outs: expected 5 dimensions (K, B, S, H, D) or 4 (K, T, H, D), "
            f"got shape {tuple(outs.shape)}"
        )
    *batch, tokens, heads, _ = outs.shape[1:]
    return outs.new_empty(outs.shape[1:]), outs.new_empty((*batch, heads, tokens), dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "prefill": _fake_prefill,
    "prefill_varlen": _fake_prefill_varlen,
    "decode": _fake_decode,
    "kv_append_": _fake_in_place,
    "tbq4_quantize": _fake_tbq4_quantize,
    "tbq4_dequantize": _fake_tbq4_dequantize,
    "tbq4_rotate": _fake_tbq4_rotate,
    "tbq4_append_": _fake_in_place,
    "tbq4_rope_append_": _fake_tbq4_rope_append,
    "tbq4_page_offsets_": _fake_in_place,
    "tbq4_attention": _fake_tbq4_attention,
    "merge_states": _fake_merge_states,
}


# --- gradients ------------------------------------------------------------------------------------------------------


_GRAD_MESSAGE = (
    "expected a tensor that requires no grad, or torch.inference_mode() or torch.no_grad() (there is no backward), got "
    "a tensor that requires grad"
)
_TANGENT_MESSAGE = "expected a tensor without a tangent (there is no forward-mode gradient), got one that has one"


def _refuse_gradients(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The op's kernel at the Autograd key: an input that requires grad, or has a tangent of forward mode, is an error;
    anything else goes on below.

    Mutated tensors get a new version, by which torch's backward knows that what it saved is gone. Inference mode skips
    the key, so all of this costs nothing there. Without a kernel here torch would only warn, at backward.
    """
    below = torch._C._after_autograd_keyset
    redispatch = op._handle.redispatch_boxed
    grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
    arguments = op._schema.arguments
    mutated = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]

    def refuse(args: tuple[Any, ...], is_guilty: Callable[[Tensor], bool], message: str) -> None:
        for argument, arg in zip(arguments, args, strict=False):
            if isinstance(arg, Tensor) and is_guilty(arg):
                raise RuntimeError(f"flashq::{op._opname}: {argument.name}: {message}")

    def check_and_redispatch(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if grad_enabled() and any_requires_grad(*args):  # tensors are never keyword arguments
            refuse(args, lambda arg: arg.requires_grad, _GRAD_MESSAGE)
        if forward_ad._current_level >= 0:  # inside of dual_level() or torch.func.jvp
            refuse(args, lambda arg: forward_ad.unpack_dual(arg).tangent is not None, _TANGENT_MESSAGE)
        results = redispatch(keyset & below, *args, **kwargs)
        for i in mutated:
            # An optional one may be None, or, as the last ones are not passed on where they are defaults, missing.
            if i < len(args) and args[i] is not None and not args[i].is_inference():
                increment_version(args[i])
        return results

    return check_and_redispatch


def _on_one_device(op: torch._ops.OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake rule that first refuses tensors of several devices; the op itself never sees a meta tensor."""
    names = [argument.name for argument in op._schema.arguments]

    def check_and_infer(*args: Any, **kwargs: Any) -> Any:
        leader = args[0]
        for name, arg in zip(names, args, strict=False):
            if isinstance(arg, Tensor) and arg.device != leader.device:
                raise RuntimeError(
                    f"flashq::{op._opname}: {name}: expected a tensor on {leader.device}, where {names[0]} is, "
                    f"got {arg.device}"
                )
        return fake(*args, **kwargs)

    return check_and_infer


# Registrations live as long as their Library object.
_LIBRARY = torch.library.Library("flashq", "IMPL")

for _name in OPS:
    _op = getattr(torch.ops.flashq, _name).default
    torch.library.register_fake(f"flashq::{_name}", _on_one_device(_op, _FAKES[_name]), lib=_LIBRARY)
    _LIBRARY.impl(_name, _refuse_gradients(_op), "Autograd", with_keyset=True)
