"""The loader: what it accepts, and its message for everything that can be wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashq
from flashq import _load


def compile_library(path: Path, code: str) -> Path:
    """Build a C library at `path`, to stand in for one that an older or broken install left behind."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = path.with_suffix(".c")
    source.write_text(code)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def test_what_is_loaded() -> None:
    assert flashq.libraries.module_problem is None
    from flashq import _C

    info = _C.build_info()
    assert info["version"] == flashq.__version__
    assert info["torch"] == flashq.libraries.built_torch
    assert info["cuda_archs"] == flashq.libraries.cuda_archs
    assert info["compiler"]
    assert hasattr(torch.ops.flashq, "merge_states")


def test_the_cuda_library_loads_where_it_was_built() -> None:
    """It needs no driver and no GPU to load."""
    built = bool(flashq.libraries.cuda_archs)
    assert flashq.libraries.cuda_problem == (None if built else _load.no_cuda_build_message())


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.9.1", True), ("2.10.0+cu128", False), ("2.13.0+cpu", False), ("3.0", False), ("1.13", True)],
)
def test_old_torch(version: str, old: bool) -> None:
    assert _load.torch_is_old(version) == old


def test_a_too_old_torch_ends_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch >= 2\.10, found 2\.9\.1\+cpu.*pip install"):
        _load.load(flashq.__version__)


def test_a_missing_library_ends_the_import(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"libflashq\.so is missing in .*Install flashq again"):
        _load.load(flashq.__version__, tmp_path)


def test_an_unloadable_library_ends_the_import(tmp_path: Path) -> None:
    (tmp_path / "libflashq.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"libflashq\.so in .* does not load: .*Install flashq again"):
        _load.load(flashq.__version__, tmp_path)


@pytest.mark.parametrize(
    ("code", "found"),
    [('const char* flashq_version() { return "0.0.9"; }', r"0\.0\.9"), ("int other;", "another version")],
)
def test_a_library_of_another_version_ends_the_import(code: str, found: str, tmp_path: Path) -> None:
    compile_library(tmp_path / "libflashq.so", code)
    with pytest.raises(ImportError, match=rf"is of flashq {found}, the package of {flashq.__version__}\. Install"):
        _load.load(flashq.__version__, tmp_path)


# Stands in for libflashq.so: of this version, built for CUDA or not, with no CUDA backend registered.
FAKE = """
const char* flashq_version() {{ return "{version}"; }}
const char* flashq_built_torch() {{ return "2.13.0"; }}
const char* flashq_cuda_archs() {{ return "{archs}"; }}
const char* flashq_describe_backend(int cuda) {{ return 0; }}
"""


def cuda_problem(tmp_path: Path, archs: str) -> str | None:
    compile_library(tmp_path / "libflashq.so", FAKE.format(version=flashq.__version__, archs=archs))
    return _load.load(flashq.__version__, tmp_path).cuda_problem


def test_a_build_without_cuda_is_told(tmp_path: Path) -> None:
    problem = cuda_problem(tmp_path, "")
    assert problem == _load.no_cuda_build_message()
    assert "FLASHQ_CUDA=1" in problem


def test_a_missing_cuda_library_is_told(tmp_path: Path) -> None:
    problem = cuda_problem(tmp_path, "9.0a")
    assert problem == _load.missing_library_message(tmp_path / "libflashq_cuda.so")


def test_an_unloadable_cuda_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "libflashq_cuda.so").write_bytes(b"not a library")
    problem = cuda_problem(tmp_path, "9.0a")
    assert problem is not None
    assert "libflashq_cuda.so" in problem
    assert "does not load" in problem


def test_a_cuda_library_of_another_build_is_told(tmp_path: Path) -> None:
    compile_library(tmp_path / "libflashq_cuda.so", "int nothing_registered;")
    assert "is of flashq another build" in (cuda_problem(tmp_path, "9.0a") or "")


@pytest.mark.parametrize(
    ("capability", "archs", "covered"),
    [
        ((8, 0), "8.0+PTX;9.0a", True),
        ((8, 6), "8.0+PTX;9.0a", True),
        ((9, 0), "8.0+PTX;9.0a", True),
        ((10, 0), "8.0+PTX;9.0a", True),
        ((7, 5), "8.0+PTX;9.0a", False),
        ((8, 9), "8.6", True),
        ((8, 0), "8.6", False),
        ((10, 0), "9.0a", False),
        ((9, 0), "8.0", False),
        ((12, 1), "12.0", True),
        ((10, 3), "10.0a", False),
        ((9, 0), "", False),
    ],
)
def test_which_gpus_a_build_covers(capability: tuple[int, int], archs: str, covered: bool) -> None:
    assert _load.gpu_is_covered(capability, archs) == covered


def test_unsupported_gpu_messages() -> None:
    old = _load.unsupported_gpu_message("Tesla T4", (7, 5), "8.0+PTX")
    assert "Tesla T4 has compute capability 7.5; expected 8.0" in old
    other = _load.unsupported_gpu_message("NVIDIA H200", (9, 0), "8.6")
    assert "this build is for 8.6" in other
    assert "FLASHQ_CUDA_ARCHS='8.6;9.0'" in other


def test_importing_flashq_imports_no_cuda_context() -> None:
    code = "import torch, flashq; print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
