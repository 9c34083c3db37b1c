"""flashq: attention for inference as PyTorch custom ops."""

__version__ = "0.1.0"
