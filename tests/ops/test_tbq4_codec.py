"""tbq4_quantize, tbq4_dequantize and tbq4_rotate: bytes, bits, and the published error."""

from __future__ import annotations

import golden
import pytest
import torch
from cases import DTYPES, randn

import flashq
from flashq import reference, tbq4


def bits(norms: torch.Tensor) -> torch.Tensor:
    return norms.contiguous().view(torch.int16)


@pytest.mark.contract(17)
@pytest.mark.parametrize("group", golden.CODEC_GROUPS)
def test_golden_vectors(group: str, backend: torch.device) -> None:
    data = {name: tensor.to(backend) for name, tensor in golden.load(group).items()}
    codes, norms = flashq.tbq4_quantize(data["x"])
    assert golden.same_bits(codes, data["codes"])
    assert torch.equal(bits(norms), bits(data["norms"]))
    assert golden.same_bits(flashq.tbq4_dequantize(data["codes"], data["norms"]), data["decoded"])


@pytest.mark.contract(3, 17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e-8, 1e4, 1e-30])
def test_the_reference_and_the_op_write_the_same_bytes(
    dtype: torch.dtype, head_dim: int, scale: float, backend: torch.device
) -> None:
    x = (scale * randn(200, head_dim)).to(dtype)
    x[5] = 0
    x[6, 3], x[7, 3] = float("nan"), float("-inf")
    x[8, ::2] *= 20
    codes, norms = flashq.tbq4_quantize(x.to(backend))
    true_codes, true_norms = reference.tbq4_quantize(x)
    assert torch.equal(codes.cpu(), true_codes)
    assert torch.equal(bits(norms).cpu(), bits(true_norms))
    for out_dtype in (None, *DTYPES):
        out = flashq.tbq4_dequantize(codes, norms, dtype=out_dtype)
        assert golden.same_bits(out.cpu(), reference.tbq4_dequantize(true_codes, true_norms, dtype=out_dtype))


@pytest.mark.contract(2)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_any_leading_strides(head_dim: int, backend: torch.device) -> None:
    room = randn(4, 3, 5, head_dim + 7).to(backend)
    views = {
        "padded": room[..., 1 : head_dim + 1],
        "transposed": room.transpose(0, 2)[..., :head_dim],
        "expanded": room[:, :1, :, 3 : 3 + head_dim].expand(4, 6, 5, head_dim),
        "one row": room[0, 0, 0, :head_dim],
        "eight leading dimensions": room[:2, :2, :2, :head_dim].reshape(1, 2, 1, 2, 1, 2, 1, 1, head_dim),
        "six dimensions in reverse": room.expand(2, 1, 2, 4, 3, 5, -1).permute(5, 4, 3, 2, 1, 0, 6)[..., :head_dim],
    }
    for name, x in views.items():
        codes, norms = flashq.tbq4_quantize(x)
        true_codes, true_norms = reference.tbq4_quantize(x.cpu())
        assert torch.equal(codes.cpu(), true_codes), name
        assert torch.equal(bits(norms).cpu(), bits(true_norms)), name
        assert codes.is_contiguous(), name
        for inverse in (False, True):
            rotated = flashq.tbq4_rotate(x, inverse=inverse).cpu()
            torch.testing.assert_close(rotated, reference.tbq4_rotate(x.cpu(), inverse=inverse), msg=name)
    codes, norms = flashq.tbq4_quantize(room[..., :head_dim])
    strided = norms.new_full((*norms.shape[:-1], 7), float("nan"))[..., : norms.shape[-1]]
    strided.copy_(norms)
    expected = reference.tbq4_dequantize(codes.cpu(), norms.cpu())
    for room, first in ((3, 1), (16, 0), (4, 4)):
        spread = codes.new_full((4, 3, 5, head_dim // 2 + room), 255)[..., first : first + head_dim // 2]
        spread.copy_(codes)
        assert golden.same_bits(flashq.tbq4_dequantize(spread, strided).cpu(), expected)


@pytest.mark.contract(14)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_no_rows(head_dim: int, backend: torch.device) -> None:
    codes, norms = flashq.tbq4_quantize(torch.empty(3, 0, head_dim, device=backend))
    assert codes.shape == (3, 0, head_dim // 2)
    assert norms.shape == (3, 0, head_dim // tbq4.block_width(head_dim))
    assert flashq.tbq4_dequantize(codes, norms).shape == (3, 0, head_dim)
    assert flashq.tbq4_rotate(torch.empty(0, head_dim, device=backend)).shape == (0, head_dim)


@pytest.mark.contract(17)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_error_is_the_published_one(head_dim: int, backend: torch.device) -> None:
    x = randn(8000, head_dim, seed=head_dim).to(backend)
    codes, norms = flashq.tbq4_quantize(x)
    decoded = flashq.tbq4_dequantize(codes, norms)
    error = (x - decoded).square().sum(-1) / x.square().sum(-1)
    expected = tbq4.EXPECTED_ERROR["gaussian"][head_dim]
    assert error.mean().item() == pytest.approx(expected, abs=2e-4)
    assert error.max() < 0.1
    ratio = decoded.norm(dim=-1) / x.norm(dim=-1)
    blockwise = 2.0**-11 + 1e-6
    assert (ratio - 1).abs().max() < blockwise
    cosine = (x * decoded).sum(-1) / x.square().sum(-1)
    assert cosine.mean().item() == pytest.approx(0.9956 if head_dim == 64 else 0.9954, abs=3e-4)


@pytest.mark.contract(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_rotate(dtype: torch.dtype, head_dim: int, backend: torch.device) -> None:
    x = randn(50, 3, head_dim, dtype=dtype)
    for inverse in (False, True):
        out = flashq.tbq4_rotate(x.to(backend), inverse=inverse).cpu()
        truth = reference.tbq4_rotate(x, inverse=inverse, dtype=torch.float64)
        assert out.dtype == dtype
        torch.testing.assert_close(out, truth.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
    x, keys = x.float().to(backend), randn(50, 3, head_dim, seed=4).to(backend)
    back = flashq.tbq4_rotate(flashq.tbq4_rotate(x), inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=3e-6)
    scores = (flashq.tbq4_rotate(x) * flashq.tbq4_rotate(keys)).sum(-1)
    torch.testing.assert_close(scores, (x * keys).sum(-1), rtol=0, atol=1e-4)


@pytest.mark.contract(7)
def test_nan_stays_in_its_block(backend: torch.device) -> None:
    x = randn(1, 256).to(backend)
    x[0, 200] = float("nan")
    decoded = flashq.tbq4_dequantize(*flashq.tbq4_quantize(x))
    assert decoded[0, 128:].isnan().all()
    assert decoded[0, :128].isfinite().all()
    x[0, 200] = float("inf")
    assert flashq.tbq4_dequantize(*flashq.tbq4_quantize(x))[0, 128:].isnan().all()


@pytest.mark.contract(17)
def test_bytes_do_not_depend_on_the_threads_flush_mode(isa: str) -> None:
    x = randn(64, 128) * 2.0**-100
    x[:, 5] = 2.0**-140
    expected = flashq.tbq4_quantize(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        codes, norms = flashq.tbq4_quantize(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(codes, expected[0])
    assert torch.equal(bits(norms), bits(expected[1]))
