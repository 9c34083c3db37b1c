"""Every numbered line of docs/contract.md has a test somewhere under tests/, marked contract(line)."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_line_of_the_contract_has_a_test() -> None:
    marked: set[int] = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        for lines in re.findall(r"mark\.contract\(([\d, ]+)\)", path.read_text()):
            marked |= {int(line) for line in lines.split(",")}
    assert marked == set(range(1, 18))
