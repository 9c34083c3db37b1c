"""What the built libraries may import, export and contain."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

import flashq

ROOT = Path(__file__).parents[2]
LIBRARY = flashq.libraries.folder / "libflashq.so"
LIBRARIES = [*sorted(flashq.libraries.folder.glob("*.so")), *sorted(flashq.libraries.folder.parent.glob("_C*.so"))]
OBJECTS = ROOT / "build" / sysconfig.get_platform() / "obj"
INCLUDE = Path(torch.__file__).parent / "include"


def symbols(path: Path, *options: str) -> list[str]:
    """The names that nm prints with `options`, demangled, without their versions."""
    text = subprocess.run(["nm", "-C", *options, str(path)], capture_output=True, text=True, check=True).stdout
    names = (re.sub(r"^[0-9a-f ]*\S ", "", line) for line in text.splitlines())
    return [name.split("@")[0].strip() for name in names]


def undefined(path: Path) -> list[str]:
    return symbols(path, "-D", "--undefined-only")


def newer_than_2_10(header: str) -> set[str]:
    """The functions that a shim header declares under a guard for a torch above 2.10."""
    names: set[str] = set()
    guards: list[bool] = []
    for line in header.splitlines():
        if re.match(r"\s*#\s*if", line):
            since = re.search(r"TORCH_FEATURE_VERSION >= TORCH_VERSION_2_(\d+)_0", line)
            guards.append(bool(since) and int(since[1]) > 10)
        elif re.match(r"\s*#\s*endif", line):
            guards.pop()
        elif any(guards):
            names.update(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", line))
    return names


def test_the_libraries_use_no_cpp_symbol_of_torch() -> None:
    assert LIBRARIES
    for path in LIBRARIES:
        assert not [name for name in undefined(path) if re.search(r"\b(at|c10|torch|caffe2)::", name)], path.name


def test_the_ops_need_no_shim_above_torch_2_10() -> None:
    headers = [INCLUDE / "torch/csrc/stable/c/shim.h", INCLUDE / "torch/csrc/inductor/aoti_torch/c/shim.h"]
    newer = set().union(*(newer_than_2_10(path.read_text()) for path in headers))
    used = {name for name in undefined(LIBRARY) if re.match(r"(aoti_)?torch_", name)}
    assert used, "the ops reach torch through its C shim"
    assert not used & newer


def test_the_shim_reader_sees_guards() -> None:
    header = """
    #if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
    int torch_old(int);
    #if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0
    int torch_new(int);
    #endif
    int aoti_torch_old();
    #endif
    """
    assert newer_than_2_10(header) == {"torch_new"}


def test_libflashq_needs_no_cuda() -> None:
    assert not [name for name in undefined(LIBRARY) if re.match(r"(cuda|cu[A-Z]|__cuda|nv)", name)]
    needed = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(cuda|nvidia|nvrtc)", needed)
    assert not re.search(r"R(UN)?PATH", needed), "torch's folder is found through the torch that is loaded"


def test_the_cuda_library_needs_no_torch() -> None:
    path = flashq.libraries.folder / "libflashq_cuda.so"
    if not path.is_file():
        assert not flashq.libraries.cuda_archs
        pytest.skip("built without nvcc")
    needed = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(torch|c10|cudart)", needed)
    assert "flashq_register_cuda_backend" in undefined(path)


def test_the_libraries_are_small() -> None:
    """A default build: an architecture more in FLASHQ_CUDA_ARCHS adds its own code."""
    limits = {"libflashq.so": 4, "libflashq_cuda.so": 64}  # MiB
    for path in flashq.libraries.folder.glob("*.so"):
        assert path.stat().st_size < limits[path.name] << 20


def test_only_the_c_interface_is_exported() -> None:
    """Not even a template of the standard library: in a library that holds a static libstdc++, the loader would mix
    the two."""
    for path in LIBRARIES:
        exported = symbols(path, "-D", "--defined-only")
        assert exported, path.name
        assert not [name for name in exported if not re.match(r"flashq_|PyInit__C$", name)], path.name


def test_no_path_of_the_build_is_inside() -> None:
    private = [str(ROOT), sysconfig.get_paths()["include"], str(INCLUDE.parent), "/tmpxft"]
    for path in LIBRARIES:
        content = path.read_bytes()
        assert not [text for text in private if text.encode() in content], path.name


def test_kernels_of_one_isa_level_share_no_symbol() -> None:
    """A weak symbol would let the linker keep the AVX-512 copy of a function for every level."""
    objects = sorted(OBJECTS.glob("cpu/kernels/*.o"))
    if not objects:
        pytest.skip("installed from another folder: no objects here")
    for path in objects:
        text = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        assert not re.findall(r"^[0-9a-f]* *[WVu] (?!DW\.ref).*$", text, re.M), path.name
