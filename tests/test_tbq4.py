"""flashq.tbq4: the tables are the published ones, blocks are lossless, sizes and errors."""

from __future__ import annotations

import golden
import pytest
import torch
from cases import randn

from flashq import reference, tbq4


def test_fingerprint_is_that_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tbq4.fingerprint() == tbq4.FINGERPRINT == "dbe9ab17e320d84f"
    wrong = tbq4.EDGES.clone()
    wrong[3] = torch.nextafter(wrong[3], torch.tensor(0.0))
    monkeypatch.setattr(tbq4, "EDGES", wrong)
    assert tbq4.fingerprint() != tbq4.FINGERPRINT


@pytest.mark.contract(17)
@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_one_codebook_in_python_and_cpp(head_dim: int) -> None:
    module = pytest.importorskip("flashq._C", reason="flashq._C was built for another Python", exc_type=ImportError)
    assert module.tbq4_codebook(head_dim) == tbq4.CENTROIDS[tbq4.block_width(head_dim)].tolist()


@pytest.mark.parametrize("group", golden.CODEC_GROUPS)
def test_blocks_of_the_golden_vectors(group: str) -> None:
    data = golden.load(group)
    assert torch.equal(tbq4.to_blocks(data["codes"], data["norms"]), data["blocks"])
    codes, norms = tbq4.from_blocks(data["blocks"])
    assert torch.equal(codes, data["codes"])
    assert torch.equal(norms.view(torch.int16), data["norms"].view(torch.int16))


@pytest.mark.parametrize("head_dim", tbq4.HEAD_DIMS)
def test_blocks_keep_every_bit_pattern(head_dim: int) -> None:
    norms = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)  # every NaN payload too
    norms = norms.reshape(-1, head_dim // tbq4.block_width(head_dim))
    codes = torch.arange(len(norms) * head_dim // 2).to(torch.uint8).reshape(len(norms), -1)
    blocks = tbq4.to_blocks(codes[:, None], norms[:, None])
    assert blocks.shape == (len(norms), 1, norms.shape[-1], tbq4.block_bytes(head_dim))
    back_codes, back_norms = tbq4.from_blocks(blocks)
    assert torch.equal(back_codes[:, 0], codes)
    assert torch.equal(back_norms[:, 0].view(torch.int16), norms.view(torch.int16))
    assert back_codes.is_contiguous()
    assert back_norms.is_contiguous()
    strided = tbq4.to_blocks(codes[::2], norms[::2])
    assert torch.equal(strided, blocks[::2, 0])
    assert tbq4.to_blocks(codes[:0], norms[:0]).shape == (0, norms.shape[-1], tbq4.block_bytes(head_dim))


def test_worked_example() -> None:
    """The example of the format's description, byte for byte."""
    x = torch.tensor([float(37 * i % 128 - 63) for i in range(128)])
    text = (
        "925e939b95923826632b65768966449483764757d655ca38259a254a45331a49b399287e14daa3839856847a8decb83a42641a8a83bcb829"
        "7243ca6247b0a865ca4d"
    )
    assert bytes(tbq4.to_blocks(*reference.tbq4_quantize(x))[0].tolist()).hex() == text
    text = "b55cc49ed3423b33745b79788cca8557a184b956b939898932bc254d362b3946c6bc"
    assert bytes(tbq4.to_blocks(*reference.tbq4_quantize(x[:64]))[0].tolist()).hex() == text


@pytest.mark.contract(3)
def test_sizes_and_refusals() -> None:
    assert [tbq4.block_width(d) for d in (64, 128, 256)] == [64, 128, 128]
    assert [tbq4.block_bytes(d) for d in (64, 128, 256)] == [34, 66, 66]
    with pytest.raises(ValueError, match="head_dim: expected 64, 128 or 256, got 96"):
        tbq4.block_width(96)
    codes, norms = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.float16)
    for wrong in ((codes.int(), norms), (codes, norms.float()), (codes, norms[:2]), (codes, norms.expand(3, 2))):
        with pytest.raises(ValueError, match=r"flashq.tbq4.to_blocks: (codes|norms): expected .*, got"):
            tbq4.to_blocks(*wrong)
    for shape in ((66,), (1, 65), (3, 66), (2, 34)):
        with pytest.raises(ValueError, match=r"flashq.tbq4.from_blocks: blocks: expected .*, got"):
            tbq4.from_blocks(torch.zeros(shape, dtype=torch.uint8))


def test_key_bias_ratio() -> None:
    bias = randn(2, 64, seed=1)
    ratio = tbq4.key_bias_ratio(torch.stack([randn(500, 64), randn(500, 64, seed=2) + 50 * bias[0]], dim=1))
    assert ratio.shape == (2,)
    assert ratio[0] < 0.1
    assert ratio[1] > 0.99
