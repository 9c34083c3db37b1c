"""`python -m flashq info`: what is installed, what this machine has, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import flashq
from flashq import tbq4
from flashq.cli import machine


def collect() -> dict[str, str]:
    """Every fact, as label -> text."""
    libraries = flashq.libraries
    levels = machine.cpu_levels()
    gpu = machine.find_gpu()
    overrides, _ = machine.cuda_overrides()
    verdict = "the published tables" if tbq4.fingerprint() == tbq4.FINGERPRINT else "NOT the published tables"
    return {
        "flashq": f"{flashq.__version__} in {libraries.folder.parent}",
        "torch": f"{torch.__version__} (flashq was built against {libraries.built_torch})",
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "libflashq.so": f"loaded, built with {machine.compiler()}",
        "libflashq_cuda.so": "not loaded" if libraries.cuda_problem else f"loaded, for {libraries.cuda_archs}",
        "flashq._C": "not loaded" if libraries.module_problem else "loaded",
        "CPU": f"{machine.cpu_model()}, {machine.core_count()} cores, {torch.get_num_threads()} threads",
        "CPU level": f"{levels.selected or 'none'} (this CPU and build have {', '.join(levels.available)})",
        "GPU": machine.describe_gpu(gpu) if gpu else "torch finds none",
        **({"CUDA overrides": overrides} if overrides else {}),
        "TBQ4 tables": f"{tbq4.fingerprint()}, {verdict}",
    }


def collect_missing() -> list[str]:
    """What is missing, each with how to get it."""
    libraries = flashq.libraries
    missing = [libraries.cuda_problem, libraries.module_problem]
    if machine.cpu_levels().selected is None:
        missing.append(f"FLASHQ_CPU_ISA: expected one of {', '.join(machine.cpu_levels().available)}.")
    missing.append(machine.cuda_overrides()[1])
    gpu = machine.find_gpu()
    if gpu:
        missing.append(gpu.problem)
    elif libraries.cuda_problem is None:
        missing.append(
            "A GPU: the CUDA library is there, but torch finds no device. "
            + ("Check nvidia-smi." if torch.version.cuda else f"torch {torch.__version__} is a build for CPUs.")
        )
    if importlib.util.find_spec("matplotlib") is None:
        missing.append("matplotlib, for `demo --plot` and the benchmarks' plots: pip install matplotlib.")
    return list(dict.fromkeys(filter(None, missing)))


def run() -> int:
    """Print both; always 0, because a missing part is no error of this command."""
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, text in collect().items():
        table.add_row(f"[bold]{label}[/]", escape(text))
    console.print(table)
    for line in collect_missing():
        console.print(f"missing: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    return 0
