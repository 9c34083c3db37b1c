"""PEP 517 backend of flashq: setuptools, plus `torch` as a build requirement where no torch is installed yet.

Building against the torch that is already there keeps pip from downloading gigabytes into its isolated environment,
and keeps the built library next to the torch that will load it. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)

MIN_TORCH = (2, 10)


class Torch(NamedTuple):
    """An installed torch: its folder, and the text of `torch.__version__`."""

    path: Path
    version: str


def find_torch() -> Torch | None:
    """Return the torch to build against, or None.

    `FLASHQ_TORCH_DIR` (the folder that holds `version.py`) wins and must be right. Next comes `purelib`, which inside
    pip's build isolation is still the environment that the package goes to. Last, whatever Python would import: the
    build requirement that `get_requires_for_build_*` asked for, or a torch of a user or system site.
    """
    forced = os.environ.get("FLASHQ_TORCH_DIR")
    if forced:
        candidates = [Path(forced)]
    else:
        candidates = [Path(sysconfig.get_paths()[key], "torch") for key in ("purelib", "platlib")]
        spec = importlib.util.find_spec("torch")
        candidates += [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for path in candidates:
        if (path / "include").is_dir() and (path / "version.py").is_file():
            match = re.search(r"^__version__ = ['\"](.+?)['\"]", (path / "version.py").read_text(), re.M)
            if match:
                return Torch(path.resolve(), match[1])
    if forced:
        raise SystemExit(f"flashq: FLASHQ_TORCH_DIR: expected a folder with include/ and version.py, got {forced}")
    return None


def require_torch() -> Torch:
    """Return the torch to build against; end the build with a message where it is missing or too old."""
    torch = find_torch()
    wanted = ".".join(map(str, MIN_TORCH))
    if torch is None:
        raise SystemExit(f"flashq: building needs torch >= {wanted} in this environment: pip install torch")
    if tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2]) < MIN_TORCH:
        raise SystemExit(f"flashq: building needs torch >= {wanted}, found {torch.version} in {torch.path}")
    return torch


def _torch_requirement() -> list[str]:
    return [] if find_torch() else ["torch>=" + ".".join(map(str, MIN_TORCH))]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return _setuptools.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return _setuptools.get_requires_for_build_editable(config_settings) + _torch_requirement()
