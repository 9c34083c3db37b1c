"""The captured layers that come with the package, and what their README says of them."""

import re

import pytest
import torch

from flashq.cli.capture import CAPTURES, PATH, load_capture
from flashq.tbq4 import key_bias_ratio

README = PATH.with_name("README.md").read_text()


@pytest.mark.parametrize("name", CAPTURES)
def test_shapes_are_those_of_the_readme(name: str) -> None:
    capture = load_capture(name)
    cells = re.search(rf"^\| `{name}` \| (.+) \|$", README, re.M)[1].split(" | ")
    heads, head_dim = cells[2].split(" / "), int(cells[3])
    assert capture.q.shape == (32, int(heads[0]), head_dim)
    assert capture.k.shape == capture.v.shape == (352, int(heads[1]), head_dim)
    assert {x.dtype for x in (capture.q, capture.k, capture.v)} == {torch.float16}
    assert all(x.isfinite().all() for x in (capture.q, capture.k, capture.v))


def test_first_layer_of_qwen_is_the_hard_case() -> None:
    ratios = {name: key_bias_ratio(load_capture(name).k).max().item() for name in CAPTURES}
    assert ratios["qwen_layer0"] > 0.98
    assert ratios["smollm2_layer5"] < 0.9


def test_capture_is_small() -> None:
    assert PATH.stat().st_size < 700_000


def test_source_and_licence_are_stated() -> None:
    for word in ("Apache License 2.0", "Qwen2.5-Coder-1.5B-Instruct", "SmolLM2-135M-Instruct", "public domain"):
        assert word in README
