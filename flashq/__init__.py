"""flashq: attention for inference as PyTorch custom ops."""

from flashq import _load

__version__ = "0.1.0"

libraries = _load.load(__version__)
"""What importing flashq loaded, and what it could not: see `python -m flashq info`."""
