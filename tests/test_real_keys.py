"""TBQ4 on the keys that break it: layer 0 of Qwen2.5-Coder-1.5B-Instruct, whose keys sit on a constant of norm 874.

tests/data/qwen2.5_layer0.npz holds captured activations in fp16, after RoPE: k and v (384, 2, 128) of a passage of
Ambrose Bierce's The Devil's Dictionary (public domain; the model is Apache-2.0), and q (32, 12, 128) of the queries at
`position`. The output error is relative to eager attention over the raw keys.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accuracy import check_tbq4, relative_l2
from cases import DTYPES, call, everywhere
from torch import Tensor

import flashq
from flashq import reference, tbq4

PAGE = 64
_DATA = {
    name: torch.from_numpy(array)
    for name, array in np.load(Path(__file__).parent / "data" / "qwen2.5_layer0.npz").items()
}


def page_offsets(keys: Tensor, *, zero_first: bool = False) -> Tensor:
    """fp16 (pages, Hkv, D) of a prompt appended at once: a page's mean if it is full or the first one, else the mean of
    the last 64 keys before it."""
    offsets = []
    for begin in range(0, len(keys), PAGE):
        own = keys[begin : begin + PAGE].float()
        full_or_first = len(own) == PAGE or begin == 0
        offsets.append(own.mean(0) if full_or_first else keys[max(0, begin - PAGE) : begin].float().mean(0))
    if zero_first:
        offsets[0] = torch.zeros_like(offsets[0])
    return torch.stack(offsets).half()


def decode_all(
    dtype: torch.dtype, offsets: Tensor | None, first: int, last: int, device: torch.device | str = "cpu"
) -> tuple[float, tuple]:
    """Every captured query as a sequence of its own over the shared pages. Returns its output error and the call."""
    q, k, v = (_DATA[name].to(dtype) for name in ("q", "k", "v"))
    lengths = _DATA["position"] + 1
    pages = len(k) // PAGE
    planes = [torch.zeros(pages, 2, PAGE, 64, dtype=torch.uint8), torch.zeros(pages, 2, PAGE, 1, dtype=torch.float16)]
    planes += [p.clone() for p in planes]
    flashq.tbq4_append_(k, v, *planes, torch.arange(len(k)), offsets)
    table = torch.arange(pages).expand(len(q), pages)
    pool = [x.unflatten(0, (pages, PAGE)) for x in (k, v)]
    args = (q[:, None], *planes, lengths, table, None, None, None, offsets, *pool, table)
    options = {"exact_first": first, "exact_last": last}
    out, _ = call("tbq4_attention", *args, device=device, **options, out_dtype=torch.float32)
    truth, _ = reference.decode(q[:, None], *pool, lengths, table, dtype=torch.float64)
    return relative_l2(out, truth), (args, options)


@pytest.mark.contract(1, 17)
@everywhere(op=["tbq4_attention"], dtype=DTYPES)
def test_page_offsets_save_the_hard_layer(op: str, dtype: torch.dtype, backend: torch.device) -> None:
    offsets = page_offsets(_DATA["k"].to(dtype))
    for first, last, bound in ((0, 0, 0.11), (4, 64, 0.015)):
        error, (args, options) = decode_all(dtype, offsets, first, last, backend)
        assert error <= bound
        check_tbq4(*args, device=backend, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_a_first_offset_it_is_lost(dtype: torch.dtype) -> None:
    """Not a wish but the reason for offsets; if it fell, the data or the kernel would have changed."""
    assert decode_all(dtype, page_offsets(_DATA["k"].to(dtype), zero_first=True), 0, 0)[0] > 0.9
    assert decode_all(dtype, page_offsets(_DATA["k"].to(dtype), zero_first=True), 4, 64)[0] > 0.9
    assert decode_all(dtype, None, 0, 0)[0] > 0.9


def test_the_bias_ratio_warns() -> None:
    assert (tbq4.key_bias_ratio(_DATA["k"]) > 0.9).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_in_16_bits(dtype: torch.dtype, isa: str) -> None:
    q, k, v = (_DATA[name].to(dtype) for name in ("q", "k", "v"))
    lengths, pages = _DATA["position"] + 1, len(k) // PAGE
    table = torch.arange(pages).expand(len(q), pages)
    pool = [x.unflatten(0, (pages, PAGE)) for x in (k, v)]
    out, lse = flashq.decode(q[:, None], *pool, lengths, table)
    truth, true_lse = reference.decode(q[:, None], *pool, lengths, table, dtype=torch.float64)
    assert relative_l2(out, truth) < 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-4)  # scores reach 12,700
