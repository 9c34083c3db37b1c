"""The rule that fixes a page's key offset, `flashq.tbq4.page_offsets`."""

import pytest
import torch

from flashq.tbq4 import page_offsets

PAGE = 64


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(seed)) + 3


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0).half()


def test_pages_that_one_append_fills_take_their_own_mean() -> None:
    k = keys(3 * PAGE)
    first, offsets = page_offsets(k, 0, PAGE)
    assert first == 0
    assert torch.equal(offsets, torch.stack([mean(page) for page in k.split(PAGE)]))


def test_partial_page_takes_the_mean_of_the_keys_before_it() -> None:
    k = keys(2 * PAGE + 5)
    _, offsets = page_offsets(k, 0, PAGE)
    assert torch.equal(offsets[2], mean(k[PAGE : 2 * PAGE]))


def test_partial_first_page_takes_the_mean_of_what_there_is() -> None:
    k = keys(5)
    first, offsets = page_offsets(k, 0, PAGE)
    assert (first, len(offsets)) == (0, 1)
    assert torch.equal(offsets[0], mean(k))
    assert torch.equal(page_offsets(k[:1], 0, PAGE)[1][0], k[0].half())


def test_append_within_a_page_opens_none() -> None:
    first, offsets = page_offsets(keys(3), PAGE + 1, PAGE, keys(PAGE))
    assert (first, offsets.shape) == (2, (0, 2, 8))


def test_token_by_token_uses_the_keys_of_earlier_appends() -> None:
    k = keys(PAGE + 1)
    first, offsets = page_offsets(k[PAGE:], PAGE, PAGE, k[:PAGE])
    assert (first, len(offsets)) == (1, 1)
    assert torch.equal(offsets[0], mean(k[:PAGE]))


def test_window_is_64_keys_or_as_many_as_there_are() -> None:
    k = keys(256 + 1)
    assert torch.equal(page_offsets(k[256:], 256, 256, k[:256])[1][0], mean(k[192:256]))
    assert torch.equal(page_offsets(k[16:17], 16, 16, k[:16])[1][0], mean(k[:16]))


def test_previous_keys_and_own_keys_join() -> None:
    k = keys(130)
    whole = page_offsets(k[60:130], 60, PAGE, k[:60])
    assert whole[0] == 1
    assert torch.equal(whole[1], torch.stack([mean(k[64:128]), mean(k[64:128])]))  # page 1 is filled, page 2 is not
    assert torch.equal(page_offsets(k[60:70], 60, PAGE, k[:60])[1][0], mean(k[:64]))


def test_offsets_are_fp16_averaged_in_fp32_and_never_infinite() -> None:
    k = torch.full((4, 1, 8), 1e6, dtype=torch.bfloat16)
    offsets = page_offsets(k, 0, 4)[1]
    assert offsets.dtype == torch.float16
    assert (offsets == 65504).all()


def test_nothing_appended() -> None:
    assert page_offsets(keys(0), 0, PAGE)[1].shape == (0, 2, 8)


def test_missing_previous_keys_are_an_error() -> None:
    with pytest.raises(ValueError, match="previous: expected the last 64 keys before position 128, got 10"):
        page_offsets(keys(1), 128, PAGE, keys(10))
    with pytest.raises(ValueError, match="previous"):
        page_offsets(keys(1), PAGE, PAGE)
    with pytest.raises(ValueError, match="start, page_size"):
        page_offsets(keys(1), -1, PAGE)
