"""The header of every result: where, with what, and when it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import flashq
from flashq.cli import machine

ROOT = Path(__file__).parent.parent


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def describe_environment() -> dict[str, str | int | float | bool | None]:
    """Facts for the header. `dirty`: tracked files differ from the commit; None outside a git checkout.

    There, on a machine that got a copy of the tree, FLASHQ_COMMIT names the commit of the copy.
    """
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks " + shlex.join(sys.argv[1:]),
        "flashq": flashq.__version__,
        "commit": _git("rev-parse", "--short=12", "HEAD") or os.environ.get("FLASHQ_COMMIT"),
        "dirty": None if status is None else bool(status),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "compiler": machine.compiler(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": machine.cpu_model(),
        "cores": machine.core_count(),
        "threads": torch.get_num_threads(),
        "cpu_level": machine.cpu_levels().selected,
        "load_average": os.getloadavg()[0],
    }
