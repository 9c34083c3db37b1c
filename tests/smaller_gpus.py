"""Tests of CUDA kernels once more, by those of smaller GPUs. The overrides are read when a process first launches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def pass_on_sm80(*arguments: str, shared_bytes: int | None = None) -> None:
    """Runs CUDA tests, by pytest's `arguments`, in a process that takes the kernels of compute capability 8.0, and at
    most so many bytes of shared memory; all have to pass, and some to run."""
    env = os.environ | {"FLASHQ_CUDA_ARCH": "80"}
    if shared_bytes is not None:
        env["FLASHQ_CUDA_SMEM"] = str(shared_bytes)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
