"""Every way to install flashq, and that none of them compiles what is compiled already.

The installs run in a copy of the source distribution that starts with this tree's objects, so that they neither
disturb this tree's libraries nor compile all of it again. Needs pip's index for the isolated builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

import flashq

ROOT = Path(__file__).parents[2]
BUILD = Path("build", sysconfig.get_platform())
NOTHING_TO_DO = "ninja: no work to do."

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command; return what it printed, and show it where the command fails."""
    environment = {name: value for name, value in {**os.environ, **env}.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, text=True, stdout=-1, stderr=-2, check=False
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, with this tree's objects."""
    folder = tmp_path_factory.mktemp("tree")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    if (ROOT / BUILD).is_dir():
        shutil.copytree(ROOT / BUILD, tree / BUILD, symlinks=True)
    return tree


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that shares this one's packages, flashq and pip excepted."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in list(packages.iterdir()):  # venv's setuptools, older than the one that torch asks for
        if not entry.name.startswith("pip"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.suffix != ".pth" and not entry.name.startswith(("flashq", "__editable__", "pip", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    ninja = Path(sysconfig.get_path("scripts"), "ninja")  # another version of it would read none of this tree's log
    (folder / "bin/ninja").symlink_to(ninja)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def warm(tree: Path, python: Path) -> Path:
    """The tree after a first install, which compiles what is not compiled yet."""
    install(python, tree)
    return tree


def install(python: Path, source: Path, *options: str, **env: str) -> str:
    return call(
        python,
        "-m",
        "pip",
        "install",
        "-v",
        "--no-deps",
        "--force-reinstall",
        *options,
        source,
        cwd=source.parent,
        **env,
    )


def installed(python: Path, folder: Path) -> list[str]:
    """Import flashq away from any source tree: where it lies, its version, the problems, one registered op."""
    code = (
        "import flashq, torch; f = flashq.libraries; torch.ops.flashq.merge_states.default;"
        "print(flashq.__file__, flashq.__version__, f.module_problem, f.cuda_problem, sep='\\n')"
    )
    return call(python, "-c", code, cwd=folder).strip().splitlines()


@pytest.mark.parametrize("options", [(), ("--no-build-isolation",)], ids=["isolated", "no-build-isolation"])
def test_a_second_install_compiles_nothing(options: tuple[str, ...], warm: Path, python: Path, tmp_path: Path) -> None:
    assert NOTHING_TO_DO in install(python, warm, *options)
    file, version, module_problem, cuda_problem = installed(python, tmp_path)
    assert Path(file).is_relative_to(python.parents[1])
    assert (version, module_problem) == (flashq.__version__, "None")
    assert (cuda_problem == "None") == bool(flashq.libraries.cuda_archs)


def test_editable(warm: Path, python: Path, tmp_path: Path) -> None:
    assert NOTHING_TO_DO in install(python, warm, "--no-build-isolation", "-e")
    file, version, module_problem, _ = installed(python, tmp_path)
    assert Path(file) == warm / "flashq/__init__.py"
    assert (version, module_problem) == (flashq.__version__, "None")


def test_the_wheel_holds_the_package_and_nothing_else(warm: Path, python: Path, tmp_path: Path) -> None:
    (warm / "flashq/lib/stale.so").write_bytes(b"")
    call(python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, warm, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"flashq_attention-{flashq.__version__}-cp")
    names = set(call(sys.executable, "-m", "zipfile", "-l", wheel, cwd=tmp_path).split())
    assert {"flashq/__init__.py", "flashq/py.typed", "flashq/lib/libflashq.so"} <= names
    assert f"flashq/_C{sysconfig.get_config_var('EXT_SUFFIX')}" in names
    assert ("flashq/lib/libflashq_cuda.so" in names) == bool(flashq.libraries.cuda_archs)
    assert not [
        name for name in names if name.startswith(("tests", "packaging", "benchmarks", "csrc")) or "stale" in name
    ]


def test_without_nvcc(warm: Path, python: Path, tmp_path: Path) -> None:
    printed = install(python, warm, "--no-build-isolation", FLASHQ_CUDA="0")
    assert "building without CUDA" in printed
    assert "obj/cuda" not in printed
    file, _, module_problem, cuda_problem = installed(python, tmp_path)
    assert module_problem == "None"
    assert "built without CUDA" in cuda_problem
    assert [path.name for path in (Path(file).parent / "lib").iterdir()] == ["libflashq.so"]
    assert not (warm / "flashq/lib/libflashq_cuda.so").exists()


def test_a_changed_header_recompiles_only_what_includes_it(warm: Path, python: Path) -> None:
    install(python, warm, "--no-build-isolation", FLASHQ_CUDA="0")
    header = warm / "csrc/exports.h"
    header.write_text(header.read_text() + "// changed\n")
    printed = install(python, warm, "--no-build-isolation", FLASHQ_CUDA="0")
    assert "obj/build_info.o" in printed
    assert "obj/python/bindings" in printed
    assert "obj/cpu/kernels" not in printed
    assert NOTHING_TO_DO in install(python, warm, "--no-build-isolation", FLASHQ_CUDA="0")


def test_the_sdist_holds_all_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for pattern in ("csrc/**/*.*", "packaging/*.py", "flashq/**/*.py", "flashq/data/*", "tests/**/*.py"):
        assert {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file()} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "flashq/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
