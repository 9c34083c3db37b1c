"""setup.py, the build backend and its choice of torch, nvcc and architectures."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import cuda_toolkit  # noqa: E402
import flashq_build  # noqa: E402


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_torch(folder: Path, version: str) -> Path:
    """A folder that looks like an installed torch, and that raises when somebody imports it."""
    torch = folder / "torch"
    (torch / "include").mkdir(parents=True)
    (torch / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    (torch / "__init__.py").write_text("raise AssertionError('imported torch')\n")
    return torch


def test_setup_py_is_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 250


@pytest.mark.parametrize("path", ["setup.py", "packaging/flashq_build.py", "packaging/cuda_toolkit.py"])
def test_the_build_never_imports_torch(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports
    assert not [name for name in imports if name.split(".")[0] == "torch"]


def test_setup_py_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    torch = fake_torch(tmp_path, "2.13.0")
    code = (
        "from flashq_build import require_torch; import setup; print(require_torch().version, 'torch' in sys.modules)"
    )
    code = f"import sys; sys.argv = ['setup.py', '--quiet', '--version']; {code}"
    env = {**os.environ, "FLASHQ_TORCH_DIR": str(torch), "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'packaging'}"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["2.13.0 False"], run.stderr


def test_the_version_stands_in_one_place() -> None:
    import flashq

    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f'__version__ = "{flashq.__version__}"' in (ROOT / "flashq/__init__.py").read_text()


def test_find_torch_prefers_the_forced_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch(tmp_path, "2.99.1+cpu")
    monkeypatch.setenv("FLASHQ_TORCH_DIR", str(torch))
    assert flashq_build.find_torch() == (torch, "2.99.1+cpu")
    monkeypatch.setenv("FLASHQ_TORCH_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="FLASHQ_TORCH_DIR: expected a folder with include/"):
        flashq_build.find_torch()


def test_torch_is_a_build_requirement_only_where_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("FLASHQ_TORCH_DIR", raising=False)
    for hook in (flashq_build.get_requires_for_build_wheel, flashq_build.get_requires_for_build_editable):
        assert not [name for name in hook() if name.startswith("torch")]
        with monkeypatch.context() as patch:
            patch.setattr(flashq_build, "find_torch", lambda: None)
            assert [name for name in hook() if name.startswith("torch")] == ["torch>=2.10"]


def test_a_too_old_torch_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQ_TORCH_DIR", str(fake_torch(tmp_path, "2.9.1")))
    with pytest.raises(SystemExit, match=r"needs torch >= 2\.10, found 2\.9\.1"):
        flashq_build.require_torch()


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("8.0+PTX;9.0a", ["8.0+PTX", "9.0a"]),
        ("9.0", ["9.0a"]),
        ("9.0+PTX 8.0", ["8.0", "9.0a+PTX"]),
        ("Hopper", ["9.0a"]),
        ("Ampere;Ada+PTX", ["8.0", "8.6", "8.9+PTX"]),
        ("7.0 7.5 8.0 8.0+PTX", ["8.0+PTX"]),
        ("12.0,10.0", ["10.0", "12.0"]),
    ],
)
def test_architectures(text: str, archs: list[str]) -> None:
    assert cuda_toolkit.parse_cuda_archs(text) == archs


@pytest.mark.parametrize("text", ["7.5", "sm_80", "Volta", "8.0+SASS", "8"])
def test_unusable_architectures_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"CUDA architectures: expected .*, got"):
        cuda_toolkit.parse_cuda_archs(text)


def test_architectures_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHQ_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert cuda_toolkit.cuda_archs() == ["8.0+PTX", "9.0a"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert cuda_toolkit.cuda_archs() == ["8.6"]
    monkeypatch.setenv("FLASHQ_CUDA_ARCHS", "9.0")
    assert cuda_toolkit.cuda_archs() == ["9.0a"]


def test_gencode_flags() -> None:
    assert cuda_toolkit.gencode_flags(["8.0+PTX", "9.0a", "12.0+PTX"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make the machine's only nvcc one that prints the given version text; None: no nvcc."""

    def install(text: str | None) -> None:
        which = lambda name, path=None: str(tmp_path / "nvcc") if text is not None and path is None else None  # noqa: E731
        monkeypatch.setattr(cuda_toolkit.shutil, "which", which)
        if text is not None:
            script(tmp_path / "nvcc", f"echo '{text}'")

    return install


def test_nvcc_is_found(nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc("Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("FLASHQ_CUDA", "1")
    assert cuda_toolkit.find_nvcc() == str(tmp_path / "nvcc")
    monkeypatch.setenv("FLASHQ_CUDA", "0")
    assert cuda_toolkit.find_nvcc() is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "no nvcc in CUDA_HOME"), ("release 11.8, V11.8.89", "is older than 12.0"), ("broken", "--version failed")],
)
def test_without_a_usable_nvcc(
    text: str | None, reason: str, nvcc, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc(text)
    monkeypatch.delenv("FLASHQ_CUDA", raising=False)
    assert cuda_toolkit.find_nvcc() is None
    said = capsys.readouterr().err
    assert "building for the CPU only" in said
    assert reason in said
    monkeypatch.setenv("FLASHQ_CUDA", "1")
    with pytest.raises(SystemExit, match=f"FLASHQ_CUDA=1, but .*{reason}"):
        cuda_toolkit.find_nvcc()


def test_flashq_cuda_takes_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQ_CUDA", "yes")
    with pytest.raises(SystemExit, match="FLASHQ_CUDA: expected 0, 1 or nothing, got 'yes'"):
        cuda_toolkit.find_nvcc()
