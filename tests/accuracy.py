"""The bounds of the contract's section "Accuracy", in one place.

The truth is the eager reference in float64 on the same (rounded) inputs. A 16 or 32-bit op may be twice as far from it
as eager attention in the inputs' own precision; TBQ4 attention is compared with attention over the decoded cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import call, move
from torch import Tensor

from flashq import reference


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Runs flashq, not the reference, on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, 0 where both are the same infinity or NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs())


def assert_lse(lse: Tensor, truth: Tensor, bound: float) -> None:
    gap = _gap(lse, truth)
    assert not gap.isnan().any(), f"lse is NaN or infinite where it should not be: {lse} against {truth}"
    worst = gap.max().item() if gap.numel() else 0.0
    assert worst <= bound, f"lse off by {worst:.3g}, allowed {bound:.3g}"


def check_16bit(
    op: str,
    *args: Tensor | None,
    threads: int = 1,
    device: torch.device | str = "cpu",
    big: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Runs prefill, prefill_varlen or decode and holds it to the contract; the arguments are the CPU's. Returns (out,
    lse). The reference runs on the CPU, if it is not too `big` for that."""
    with using_threads(threads):
        out, lse = call(op, *args, device=device, **kwargs)
    place = device if big else "cpu"
    inputs, options = [move(x, place) for x in args], {name: move(x, place) for name, x in kwargs.items()}
    compare_16bit(out, lse, op, *inputs, on_cuda=torch.device(device).type == "cuda", **options)
    return out, lse


def compare_16bit(out: Tensor, lse: Tensor, op: str, *args: Tensor | None, on_cuda: bool, **kwargs: Any) -> None:
    """Holds results of prefill, prefill_varlen or decode, on the CPU, to the contract. The reference runs where the
    arguments are."""
    q = args[0]
    options = {k: v for k, v in kwargs.items() if k != "out_dtype"}
    stats: reference.Stats = {}
    eager = getattr(reference, op)
    truth, true_lse = (x.cpu() for x in eager(*args, **options, dtype=torch.float64, stats=stats))
    low = eager(*args, **options, dtype=q.dtype)[0].cpu()

    assert out.shape == q.shape
    assert out.dtype == (kwargs.get("out_dtype") or q.dtype)
    assert out.is_contiguous()
    assert lse.shape == true_lse.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    gap, eager_gap = _gap(out, truth), _gap(low, truth)
    assert not gap.isnan().any(), "out is NaN or infinite where it should not be"
    if gap.numel():
        assert gap.max() <= 2 * eager_gap.max() + 1e-5, f"{gap.max():.3g} against eager's {eager_gap.max():.3g}"
        if gap.unique().numel() >= 1000:  # the mean of a few roundings is luck, also where heads are copies of one
            assert gap.mean() <= 1.5 * eager_gap.mean(), f"mean {gap.mean():.3g}, eager's {eager_gap.mean():.3g}"
    score = stats["max_score"] if stats else 0.0
    bound = 1e-5 + 5e-7 * score if q.dtype == torch.float32 else 1e-4 + 1e-6 * score
    if on_cuda and kwargs.get("softcap"):
        bound = 1e-4 + 5e-4 * score  # the hardware's tanh
    assert_lse(lse, true_lse, bound)


def relative_l2(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


def check_tbq4(
    *args: Tensor | None,
    threads: int = 1,
    device: torch.device | str = "cpu",
    big: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Runs tbq4_attention with out_dtype=float32 and holds it to the contract; the arguments are the CPU's. Returns
    (out, lse). The reference runs on the CPU, if it is not too `big` for that."""
    q = args[0]
    kwargs["out_dtype"] = torch.float32
    with using_threads(threads):
        out, lse = call("tbq4_attention", *args, device=device, **kwargs)
    stats: reference.Stats = {}
    del kwargs["out_dtype"]
    place = device if big else "cpu"
    inputs, options = [move(x, place) for x in args], {name: move(x, place) for name, x in kwargs.items()}
    truth, true_lse = (x.cpu() for x in reference.tbq4_attention(*inputs, **options, dtype=torch.float64, stats=stats))

    assert out.shape == q.shape
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.shape == true_lse.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert not out.isnan().any()
    assert relative_l2(out, truth) <= 2e-3
    coded, whole = stats.get("max_score_no_offset", 0.0), stats.get("max_score", 0.0)
    assert_lse(lse, true_lse, 2e-3 + 5e-5 * coded + 1e-6 * whole)
    return out, lse
