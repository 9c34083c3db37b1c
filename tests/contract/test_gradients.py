"""Inputs that require grad or carry a tangent are refused (docs/contract.md, line 15)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashq
from flashq import _register, reference


def gradient_calls() -> dict[str, tuple[Tensor, ...]]:
    q, k = torch.randn(1, 3, 4, 64), torch.randn(1, 9, 2, 64)
    planes = [x.transpose(1, 2).contiguous() for x in reference.tbq4_quantize(k)]
    lengths, slots = torch.tensor([9]), torch.arange(9)
    return {
        "prefill": (q, k, k),
        "prefill_varlen": (q[0], k[0], k[0], torch.tensor([0, 3]), torch.tensor([0, 9])),
        "decode": (q, k, k, lengths),
        "tbq4_attention": (q, *planes, *planes, lengths),
        "kv_append_": (k[0], k[0], torch.zeros_like(k), torch.zeros_like(k), slots),
        "tbq4_append_": (k[0], k[0], *planes, *planes, slots),
        "tbq4_rope_append_": (
            *(torch.randn(9, heads, 64) for heads in (4, 2, 2)),
            *torch.randn(2, 9, 32),
            slots,
            *planes,
            *(x.clone() for x in planes),
            slots,
            torch.zeros(1, 2, 64, dtype=torch.float16),
            torch.zeros(1, 9, 2, 64),
            torch.zeros(1, 9, 2, 64),
            slots,
        ),
        "tbq4_page_offsets_": (
            k[0],
            *planes,
            torch.zeros(1, 2, 64, dtype=torch.float16),
            lengths,
            torch.tensor([[0]]),
            torch.tensor([0, 9]),
        ),
        "tbq4_quantize": (k,),
        "tbq4_rotate": (k,),
        "tbq4_dequantize": tuple(planes),
        "merge_states": (torch.randn(2, 1, 3, 4, 64), torch.randn(2, 1, 4, 3)),
    }


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", _register.OPS)
def test_inputs_that_require_grad_are_refused(op: str) -> None:
    args = gradient_calls()[op]
    names = [a.name for a in getattr(torch.ops.flashq, op).default._schema.arguments]
    for i, tensor in enumerate(args):
        if not tensor.is_floating_point():
            continue
        learning = [
            x.detach().clone().requires_grad_(i == j) if x.is_floating_point() else x for j, x in enumerate(args)
        ]
        for call in (getattr(flashq, op), getattr(torch.ops.flashq, op)):
            with pytest.raises(
                RuntimeError, match=f"flashq::{op}: {names[i]}: expected .*, got a tensor that requires grad"
            ):
                call(*learning)
        with torch.no_grad():
            getattr(flashq, op)(*learning)
        with torch.inference_mode():
            getattr(flashq, op)(*learning)
    results = getattr(flashq, op)(*args)
    for result in results if isinstance(results, tuple) else [results]:
        assert result is None or not result.requires_grad


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", _register.OPS)
def test_inputs_with_a_tangent_are_refused(op: str) -> None:
    args = gradient_calls()[op]
    names = [a.name for a in getattr(torch.ops.flashq, op).default._schema.arguments]
    for i, tensor in enumerate(args):
        if not tensor.is_floating_point():
            continue
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == j else x for j, x in enumerate(args)]
            with pytest.raises(RuntimeError, match=f"flashq::{op}: {names[i]}: expected a tensor without a tangent"):
                getattr(flashq, op)(*dual)
            getattr(flashq, op)(*args)


@pytest.mark.contract(15)
@pytest.mark.parametrize("op", ["kv_append_", "tbq4_append_", "tbq4_rope_append_"])
def test_backward_refuses_what_an_append_has_overwritten(op: str) -> None:
    """Of saved tensors torch knows the version: a gradient from the new bytes would be wrong without a word."""
    args = gradient_calls()[op]
    arguments = getattr(torch.ops.flashq, op).default._schema.arguments
    written = [a.alias_info is not None for a in arguments[: len(args)]]
    cache = [x for x, is_written in zip(args, written, strict=True) if is_written and x.is_floating_point()][-1]
    weight = torch.ones(1, requires_grad=True)
    product = (cache * weight).sum()
    with torch.no_grad():
        getattr(flashq, op)(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    versions = [x._version for x in args]
    getattr(flashq, op)(*args)
    assert [x._version > before for x, before in zip(args, versions, strict=True)] == written
    with torch.inference_mode():
        inferred = [x.clone() for x in args]
    getattr(flashq, op)(*inferred)  # tensors without a version
