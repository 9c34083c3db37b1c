"""Find and load flashq's libraries; one message for everything that can be wrong with them.

`libflashq.so` registers the ops with torch and must load. `libflashq_cuda.so` and the module `_C` may be absent: what
keeps them away is remembered for `python -m flashq info`, and a CUDA call says it too.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import torch

MIN_TORCH = "2.10"
LIBRARY_FOLDER = Path(__file__).parent / "lib"
REINSTALL = "Install flashq again: pip install --no-build-isolation --force-reinstall --no-deps . in its source tree."


class Libraries(NamedTuple):
    """What is loaded. A problem is a full message, or None where there is none."""

    folder: Path
    built_torch: str
    """The version of the torch that flashq was built against."""
    cuda_archs: str
    """The CUDA architectures of the build, as "8.0+PTX;9.0a"; "" for a build without CUDA."""
    cuda_problem: str | None
    module_problem: str | None


def torch_too_old_message(found: str) -> str:
    """The message for a torch below 2.10, whose C interface lacks what the ops need."""
    return f"flashq needs torch >= {MIN_TORCH}, found {found}. Upgrade it: pip install 'torch>={MIN_TORCH}'."


def missing_library_message(path: Path) -> str:
    """The message for a library that should have been installed with the package."""
    return f"flashq: {path.name} is missing in {path.parent}. {REINSTALL}"


def unloadable_library_message(path: Path, error: str) -> str:
    """The message for a library that is there, but that the dynamic loader refused with `error`."""
    return f"flashq: {path.name} in {path.parent} does not load: {error}. {REINSTALL}"


def version_mismatch_message(path: Path, library: str, package: str) -> str:
    """The message for a library that was built for another version of the package, or of flashq's libraries."""
    return f"flashq: {path.name} in {path.parent} is of flashq {library}, the package of {package}. {REINSTALL}"


def no_cuda_build_message() -> str:
    """The message for a build that found no nvcc, or was told to leave CUDA out."""
    return (
        "flashq was built without CUDA, so it runs on CPU tensors only. To use a GPU, have a torch that was built for "
        "CUDA, install the CUDA toolkit (nvcc 12 or newer on PATH or in CUDA_HOME) and install flashq again with "
        "FLASHQ_CUDA=1."
    )


def unsupported_gpu_message(name: str, capability: tuple[int, int], cuda_archs: str) -> str:
    """The message for a GPU of compute `capability` that none of the architectures of the build covers."""
    own = f"{capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"flashq: {name} has compute capability {own}; expected 8.0 (Ampere) or newer."
    return (
        f"flashq: {name} has compute capability {own}, and this build is for {cuda_archs}. "
        f"Install flashq again with FLASHQ_CUDA_ARCHS='{cuda_archs};{own}'."
    )


def gpu_is_covered(capability: tuple[int, int], cuda_archs: str) -> bool:
    """Whether a build for `cuda_archs` ("8.0+PTX;9.0a") runs on a GPU of compute `capability`.

    Machine code runs on its own major version from its minor one up; of an `a` architecture, on that one only. PTX
    runs on everything newer.
    """
    for entry in filter(None, cuda_archs.split(";")):
        arch, _, ptx = entry.partition("+")
        major, minor = (int(part) for part in arch.rstrip("af").split("."))
        exact = arch.endswith("a")
        if capability == (major, minor) or (ptx and capability >= (major, minor)):
            return True
        if not exact and capability[0] == major and capability[1] >= minor:
            return True
    return False


def torch_is_old(version: str) -> bool:
    """Whether a torch of `version` ("2.13.0+cpu") is older than `MIN_TORCH`."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < tuple(map(int, MIN_TORCH.split(".")))


def load(package_version: str, folder: Path = LIBRARY_FOLDER) -> Libraries:
    """Load the libraries in `folder` and register the ops.

    Raises:
        ImportError: torch is too old, or `libflashq.so` is missing, does not load, or is of another version than
            `package_version`.
    """
    if torch_is_old(torch.__version__):
        raise ImportError(torch_too_old_message(torch.__version__))
    path = folder / "libflashq.so"
    if not path.is_file():
        raise ImportError(missing_library_message(path))
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(unloadable_library_message(path, str(error))) from error
    version = _text(library, "flashq_version")
    if version != package_version:
        raise ImportError(version_mismatch_message(path, version or "another version", package_version))
    cuda_archs = _text(library, "flashq_cuda_archs") or ""
    cuda_problem = _load_cuda(library, folder / "libflashq_cuda.so", cuda_archs)
    return Libraries(folder, _text(library, "flashq_built_torch") or "", cuda_archs, cuda_problem, _load_module())


def _text(library: ctypes.CDLL, function: str, *arguments: object) -> str | None:
    """Call a C function that returns a text; None where it returns NULL or does not exist."""
    try:
        call = getattr(library, function)
    except AttributeError:
        return None
    call.restype = ctypes.c_char_p
    value = call(*arguments)
    return None if value is None else value.decode()


def _load_cuda(library: ctypes.CDLL, path: Path, cuda_archs: str) -> str | None:
    """Load the CUDA backend, which registers itself with `library`; return what is wrong, if anything."""
    if not path.is_file():
        return missing_library_message(path) if cuda_archs else no_cuda_build_message()
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return unloadable_library_message(path, str(error))
    if _text(library, "flashq_describe_backend", ctypes.c_bool(True)) is None:
        return version_mismatch_message(path, "another build", "this one")
    return None


def _load_module() -> str | None:
    """Import flashq._C, which only the Python that it was built for can; return what is wrong, if anything."""
    try:
        importlib.import_module("flashq._C")
    except ImportError as error:
        return f"flashq._C does not load: {error}. The ops work without it. {REINSTALL}"
    return None
