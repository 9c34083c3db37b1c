"""Builds flashq's three libraries with ninja; everything else about the package stands in pyproject.toml.

    flashq/lib/libflashq.so        the ops and the CPU backend
    flashq/lib/libflashq_cuda.so   the CUDA backend, where there is an nvcc
    flashq/_C.<python>.so          build information and plans for Python, no tensors

`build/<platform>/` keeps the objects, so that every install from this tree is incremental. Torch is read, never
imported. The environment variables that steer the build are listed in CONTRIBUTING.md.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "packaging"))
from cuda_toolkit import cuda_archs, find_nvcc, gencode_flags, say  # noqa: E402
from flashq_build import require_torch  # noqa: E402

BUILD = Path("build", sysconfig.get_platform())  # relative to ROOT, where ninja runs
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")] + ["-mprefer-vector-width=512"]
ISA_FLAGS = {"portable": [], "avx2": AVX2, "avx512": AVX2 + AVX512} if X86 else {"portable": []}
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-Wall"]
CXX_FLAGS += ["-Wextra", "-Icsrc"]
# The torch API of 2.10, whatever newer torch the headers come from.
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-isystem {BUILD}/include/torch"]
EXPORTS = "csrc/exports.map"
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-Icsrc"]


def package_version() -> str:
    match = re.search(r'^__version__ = "(.+)"', (ROOT / "flashq/__init__.py").read_text(), re.M)
    assert match
    return match[1]


def write_if_changed(path: Path, content: bytes) -> None:
    """Leave an unchanged file's time alone, so that ninja rebuilds nothing for it."""
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def copy_headers(include: Path, names: list[str], to: Path) -> None:
    """Copy `names` and all that they include from `include`.

    A copy under build/ stays where it is, while pip unpacks the originals under a new path and with new times for
    every isolated build. And it holds only torch's stable headers: including an unstable one fails to compile.
    """
    todo, done = list(names), set()
    while todo:
        name = todo.pop()
        source = include / name
        if name in done or not source.is_file():
            continue
        done.add(name)
        content = source.read_bytes()
        write_if_changed(to / name, content)
        for quote, found in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', content.decode(), re.M):
            todo.append(found)
            if quote == '"':
                todo.append(os.path.normpath(Path(name).parent / found))


def job_count() -> int:
    """MAX_JOBS, else one per core as far as memory allows 2 GiB each (cicc and cc1plus peak below that)."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(available[1]) // (2 << 20) if available else 1
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


class Ninja:
    """The text of a build.ninja: compile() and link() add a step and return its output."""

    def __init__(self) -> None:
        self.text = f"ninja_required_version = 1.8\nbuilddir = {BUILD}\n"
        self.targets: list[str] = []

    def rule(self, name: str, command: str, depfile: bool) -> None:
        deps = "  depfile = $out.d\n  deps = gcc\n" if depfile else ""
        self.text += f"rule {name}\n  command = {command}\n  description = {name} $out\n{deps}"

    def compile(self, rule: str, source: Path, flags: list[str], suffix: str = "") -> str:
        out = f"{BUILD}/obj/{source.relative_to('csrc').with_suffix(suffix + '.o')}"
        self.text += f"build {out}: {rule} {source}\n  flags = {' '.join(flags)}\n"
        return out

    def link(self, rule: str, name: str, objects: list[str], flags: list[str], needs: str = "") -> str:
        out = f"{BUILD}/flashq/{name}"
        self.text += f"build {out}: {rule} {' '.join(objects)} | {EXPORTS} {needs}\n  flags = {' '.join(flags)}\n"
        self.targets.append(name)
        return out


def sources(pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(f"csrc/{pattern}"))


def define(name: str, text: str) -> str:
    return f"'-DFLASHQ_{name}=\"{text}\"'"


def write_ninja_file() -> list[str]:
    """Write build.ninja and the header copies; return the libraries, relative to the package's folder."""
    torch = require_torch()
    nvcc = find_nvcc()
    import pybind11

    stable = ("torch/csrc/stable", "torch/headeronly")
    include = torch.path / "include"
    headers = [str(path.relative_to(include)) for folder in stable for path in (include / folder).rglob("*.h")]
    copy_headers(include, headers, ROOT / BUILD / "include/torch")
    headers = ["pybind11/pybind11.h", "pybind11/stl.h"]
    copy_headers(Path(pybind11.get_include()), headers, ROOT / BUILD / "include/pybind11")
    torch_lib = ROOT / BUILD / "torch_lib"  # a link, so that another environment's torch does not mean a new command
    torch_lib.unlink(missing_ok=True)
    torch_lib.symlink_to(torch.path / "lib")

    werror = os.environ.get("FLASHQ_WERROR") == "1"
    prefix_map = '-ffile-prefix-map="$$PWD"=.'  # the shell's, so that a moved tree keeps its commands and objects
    cxx = os.environ.get("CXX", "c++")
    flags = " ".join([*CXX_FLAGS, prefix_map] + ["-Werror"] * werror)
    ninja = Ninja()
    ninja.rule("cxx", f"{cxx} {flags} $flags -MD -MF $out.d -c $in -o $out", depfile=True)
    ninja.rule("link", f"{cxx} -shared -Wl,--as-needed,--version-script={EXPORTS} $in $flags -o $out", depfile=False)

    archs = ";".join(cuda_archs()) if nvcc and sources("cuda/*.cu") else ""
    facts = {"VERSION": package_version(), "TORCH_VERSION": torch.version, "CUDA_ARCHS": archs}
    objects = [ninja.compile("cxx", Path("csrc/build_info.cpp"), [define(*fact) for fact in facts.items()])]
    objects += [ninja.compile("cxx", source, TORCH_FLAGS) for source in sources("ops/*.cpp")]
    objects += [ninja.compile("cxx", source, []) for source in sources("cpu/*.cpp")]
    for isa, isa_flags in ISA_FLAGS.items():
        kernels = sources("cpu/kernels/*.cpp")
        objects += [ninja.compile("cxx", source, [*isa_flags, f"-DFLASHQ_ISA={isa}"], f".{isa}") for source in kernels]
    link_flags = ["-Wl,--no-undefined,-soname,libflashq.so", f"-L{BUILD}/torch_lib", "-ltorch_cpu", "-ldl", "-lpthread"]
    library = ninja.link("link", "lib/libflashq.so", objects, link_flags)

    if archs:
        say(f"building the CUDA library for {archs} with {nvcc}")
        host = f"-ccbin={os.environ['CXX']} " if "CXX" in os.environ else ""
        flags = " ".join([*NVCC_FLAGS, f"-Xcompiler={prefix_map}", *gencode_flags(archs.split(";"))])
        flags += " -Werror=all-warnings -Xcompiler=-Werror" * werror
        ninja.rule("nvcc", f"{nvcc} {host}{flags} $flags -MD -MF $out.d -c $in -o $out", depfile=True)
        ninja.rule("nvcc_link", f"{nvcc} {host}-shared -cudart=static $in $flags -o $out", depfile=False)
        defines = [define("CUDA_ARCHS", archs)]
        objects = [ninja.compile("nvcc", source, defines) for source in sources("cuda/*.cu")]
        link_flags = [f"-L{BUILD}/flashq/lib", "-lflashq", "'-Xlinker=-rpath=$$ORIGIN'"]
        link_flags += [f"-Xlinker=--as-needed,--no-undefined,--version-script={EXPORTS},-soname,libflashq_cuda.so"]
        ninja.link("nvcc_link", "lib/libflashq_cuda.so", objects, link_flags, needs=library)

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    module = ["-DNDEBUG", f"-isystem {BUILD}/include/pybind11", f"-isystem {sysconfig.get_paths()['include']}"]
    objects = [ninja.compile("cxx", source, module, suffix.removesuffix(".so")) for source in sources("python/*.cpp")]
    link_flags = [f"-L{BUILD}/flashq/lib", "-lflashq", "'-Wl,-rpath,$$ORIGIN/lib'"]
    ninja.link("link", f"_C{suffix}", objects, link_flags, needs=library)
    write_if_changed(ROOT / BUILD / "build.ninja", ninja.text.encode())
    return ninja.targets


class BuildLibraries(build_ext):
    """Runs ninja, then puts the libraries into the tree's package and, for a wheel, into the wheel's."""

    libraries_built: list[Path]

    def run(self) -> None:
        (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
        with open(ROOT / BUILD / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two installs at once would write the same objects
            names = write_ninja_file()
            targets = [f"{BUILD}/flashq/{name}" for name in names]
            command = [sys.executable, "-m", "ninja", "-f", f"{BUILD}/build.ninja", "-j", str(job_count()), *targets]
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                raise SystemExit("flashq: the build failed; the compiler's message stands above")
            # Always into the tree: `python -m flashq` started there finds the tree's package before an installed one.
            self.libraries_built = self.place(names, ROOT / "flashq")
            if not (self.inplace or self.editable_mode):
                self.libraries_built = self.place(names, Path(self.build_lib, "flashq"))

    def place(self, names: list[str], package: Path) -> list[Path]:
        (package / "lib").mkdir(parents=True, exist_ok=True)
        if "lib/libflashq_cuda.so" not in names:
            (package / "lib/libflashq_cuda.so").unlink(missing_ok=True)  # of an earlier build with CUDA
        for name in names:
            fresh = package / f"{name}.new"
            shutil.copyfile(ROOT / BUILD / "flashq" / name, fresh)
            fresh.chmod(0o755)
            fresh.replace(package / name)  # a process that has the old file mapped keeps it
        return [package / name for name in names]

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "libraries_built", [])]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPackage(build_py):
    """Starts from an empty folder, so that a module that was removed or renamed does not get into a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "flashq"), ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("flashq._C", sources=[])],  # makes the wheel one of this platform
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPackage},
)
