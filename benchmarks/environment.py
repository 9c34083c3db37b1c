"""The header of every result: where, with what, and when it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import flashq
from flashq.cli import machine

ROOT = Path(__file__).parent.parent

Environment = dict[str, str | int | float | bool | None]

# nvidia-smi's name -> ours. MHz, W, degrees Celsius.
SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock",
    "clocks.max.sm": "max_sm_clock",
    "clocks.mem": "memory_clock",
    "power.limit": "power_limit",
    "temperature.gpu": "temperature",
}


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def parse_smi(line: str) -> dict[str, str | float | None]:
    """A line of `nvidia-smi --query-gpu` with SMI_FIELDS: text for the driver, else numbers; None: it does not say."""
    values: dict[str, str | float | None] = dict.fromkeys(SMI_FIELDS.values())
    for name, text in zip(SMI_FIELDS.values(), line.split(","), strict=False):
        if name == "driver":
            values[name] = text.strip() or None
        elif re.fullmatch(r"\d+(\.\d+)?", text.strip()):
            values[name] = float(text)
    return values


def read_smi(device: int = 0) -> dict[str, str | float | None]:
    """The driver, and this moment's clocks and limits of a GPU; nothing is changed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return parse_smi("")
    return parse_smi(done.stdout if done.returncode == 0 else "")


def describe_gpu() -> Environment:
    """More facts for the header of a run on the current GPU; its clocks as they are now."""
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cuda_archs": flashq.libraries.cuda_archs,
        **read_smi(device),
    }


def shown_command(arguments: Sequence[str]) -> str:
    """The command of a run, without --out: that names a folder of the machine, and changes no figure."""
    words, shown = iter(arguments), []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            shown.append(word)
    return "python -m benchmarks " + shlex.join(shown)


def describe_environment() -> Environment:
    """Facts for the header. `dirty`: tracked files differ from the commit; None where git does not know.

    On a machine that got a copy of the tree, FLASHQ_COMMIT names the commit of the copy, whatever git says there.
    """
    commit = os.environ.get("FLASHQ_COMMIT")
    status = None if commit else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shown_command(sys.argv[1:]),
        "flashq": flashq.__version__,
        "commit": commit or _git("rev-parse", "--short=12", "HEAD"),
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
