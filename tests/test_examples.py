"""Every example runs as it stands and says what it should; the decode loop stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashq

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "continuous_batching": "all 16 results are those of the requests served alone",
    "decode_loop": "largest difference to logits without a cache: ",
    "transformers_generate": "243 tokens a row, ",
    "shared_prefix": "6 questions over 700 tokens: ",
}


def run(code: str, folder: Path) -> str:
    """What the code prints, in a process of its own that finds this flashq."""
    search = f"import sys; sys.path.append({str(Path(flashq.__file__).parents[1])!r}); "
    done = subprocess.run(
        [sys.executable, "-c", search + code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    path = next(path for path in EXAMPLES if path.stem == name)
    assert SAYS[name] in run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", tmp_path)


def test_the_code_of_the_document_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/caches.md").read_text(), re.M | re.S)
    run("exec(" + repr(code) + ")", tmp_path)


def test_the_decode_loop_is_short_and_uses_only_torch_ops() -> None:
    text = next(path for path in EXAMPLES if path.stem == "decode_loop").read_text()
    assert len(text.splitlines()) <= 60
    assert "flashq." not in text.replace("torch.ops.flashq", "")
