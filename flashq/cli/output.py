"""What the commands share when they print and write files."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress


def progress_bar(console: Console) -> Progress:
    """A bar that is gone when the work is done; in a file or a pipe it leaves no trace."""
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def output_file(text: str) -> Path:
    """For argparse: a file that can be written, which is known before minutes of work and not after.

    Raises:
        argparse.ArgumentTypeError: there is no such folder, or it is a folder itself.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path
