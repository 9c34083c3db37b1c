"""README.md's code runs, its commands are two lines, and what it refers to exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashq

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=["functions", "ops", "caches", "transformers"])
def test_example_runs(example: str, tmp_path: Path) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    if "transformers" in example:
        pytest.importorskip("transformers")
    path = tmp_path / "example.py"
    path.write_text(example)
    search = f"import sys; sys.path.append({str(Path(flashq.__file__).parents[1])!r}); "
    run = search + f"exec(compile(open({str(path)!r}).read(), 'README.md', 'exec'))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    for stated, printed in zip(
        re.findall(r"about ([\d.]+)", example), re.findall(r": ([\d.]+)", done.stdout), strict=True
    ):
        assert float(printed) == pytest.approx(float(stated), abs=0.03)


def test_set_up_is_two_commands() -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", README, re.M | re.S)
    commands = block.splitlines()
    assert len(commands) == 2
    assert "python -m flashq demo" in commands[0]
    assert ".[test]" in commands[1]
    assert "pytest" in commands[1]
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"grep -m1 -E '(.+)' README.md", script)[1]
    assert re.search(pattern, README, re.M)[0] in commands[1]


def test_every_op_is_in_the_matrix_and_every_link_exists() -> None:
    matrix = README[README.index("## What runs where") : README.index("## Limits")]
    for op in flashq.reference.__all__:
        assert f"`{op}`" in matrix
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_contract_documents_every_op_and_line() -> None:
    contract = (ROOT / "docs/contract.md").read_text()
    assert [int(number) for number in re.findall(r"^(\d+)\. \*\*", contract, re.M)] == list(range(1, 18))
    for op in flashq.reference.__all__:
        assert re.search(rf"^{op}\(", contract, re.M), op
