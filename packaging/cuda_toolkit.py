"""The CUDA side of the build: which nvcc, and which GPU architectures it compiles for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

MIN_CUDA_ARCH = (8, 0)
DEFAULT_CUDA_ARCHS = "8.0+PTX;9.0a"
# The names that TORCH_CUDA_ARCH_LIST accepts, as far as flashq has kernels for them.
CUDA_ARCH_NAMES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0a", "Blackwell": "10.0;12.0"}


def say(text: str) -> None:
    print(f"flashq: {text}", file=sys.stderr, flush=True)


def find_nvcc() -> str | None:
    """The nvcc to use, or None for a build without CUDA; says which. FLASHQ_CUDA=1 requires one, 0 skips it."""
    wish = os.environ.get("FLASHQ_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"flashq: FLASHQ_CUDA: expected 0, 1 or nothing, got {wish!r}")
    if wish == "0":
        say("building without CUDA, because FLASHQ_CUDA=0")
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [shutil.which("nvcc", path=f"{home}/bin") for home in homes if home]
    nvcc = next(filter(None, [*found, shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]), None)
    reason = "no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        match = re.search(r"release (\d+)\.(\d+)", text)
        if match and int(match[1]) >= 12:
            return nvcc
        reason = f"{nvcc} is older than 12.0 (C++20, sm_90a)" if match else f"{nvcc} --version failed"
    if wish == "1":
        raise SystemExit(f"flashq: FLASHQ_CUDA=1, but {reason}")
    say(f"building for the CPU only: {reason}. CUDA calls will fail; install the CUDA toolkit and reinstall for them.")
    return None


def parse_cuda_archs(text: str) -> list[str]:
    """Turn "8.0+PTX;9.0 Hopper" into ["8.0+PTX", "9.0a"]: sorted, no doubles, 9.0 read as 9.0a.

    The wgmma and TMA instructions exist in `sm_90a` only, so a plain 9.0 would lose the Hopper kernels. Architectures
    below 8.0 are dropped, because lists made for torch often hold them; raises SystemExit where nothing is left or an
    entry is neither a number nor a known name.
    """
    ptx: dict[str, bool] = {}
    for entry in re.split(r"[;,\s]+", text.strip()):
        name, plus, suffix = entry.partition("+")
        for arch in CUDA_ARCH_NAMES.get(name, name).split(";"):
            match = re.fullmatch(r"(\d+)\.(\d)([af]?)", arch)
            if not match or (plus and suffix != "PTX"):
                known = ", ".join(CUDA_ARCH_NAMES)
                raise SystemExit(
                    f"flashq: CUDA architectures: expected like '{DEFAULT_CUDA_ARCHS}' or {known}, got {text!r}"
                )
            if (int(match[1]), int(match[2])) < MIN_CUDA_ARCH:
                continue
            arch = "9.0a" if arch == "9.0" else arch
            ptx[arch] = ptx.get(arch, False) or bool(plus)
    if not ptx:
        raise SystemExit(f"flashq: CUDA architectures: expected one of at least 8.0, got {text!r}")
    ordered = sorted(ptx, key=lambda arch: float(arch.rstrip("af")))
    return [arch + ("+PTX" if ptx[arch] else "") for arch in ordered]


def cuda_archs() -> list[str]:
    """The CUDA architectures to build for: `FLASHQ_CUDA_ARCHS`, else `TORCH_CUDA_ARCH_LIST`, else the default."""
    chosen = os.environ.get("FLASHQ_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHS
    return parse_cuda_archs(chosen)


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for `parse_cuda_archs`' result: machine code for each, and PTX where asked.

    PTX of an `a` architecture runs on nothing else, so its PTX is made for the plain one.
    """
    flags = []
    for entry in archs:
        arch, _, ptx = entry.partition("+")
        number = arch.replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            plain = number.rstrip("af")
            flags.append(f"-gencode=arch=compute_{plain},code=compute_{plain}")
    return flags
