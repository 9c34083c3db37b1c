"""flashq: attention for inference as PyTorch custom ops.

The ops are ``torch.ops.flashq.*``; the functions here take the same arguments and say what they are. `flashq.reference`
holds a plain eager version of each, `flashq.tbq4` the 4-bit format.
"""

from flashq import _load

__version__ = "0.1.0"

libraries = _load.load(__version__)
"""What importing flashq loaded, and what it could not: see `python -m flashq info`."""

# From here on the ops are registered.
from flashq import _register, reference, tbq4  # noqa: E402, F401
from flashq.caches import CacheFullError, PagedKVCache, TBQ4Cache  # noqa: E402
from flashq.ops import (  # noqa: E402
    decode,
    kv_append_,
    merge_states,
    prefill,
    prefill_varlen,
    tbq4_append_,
    tbq4_attention,
    tbq4_dequantize,
    tbq4_page_offsets_,
    tbq4_quantize,
    tbq4_rope_append_,
    tbq4_rotate,
)

__all__ = [
    "CacheFullError",
    "PagedKVCache",
    "TBQ4Cache",
    "__version__",
    "decode",
    "kv_append_",
    "libraries",
    "merge_states",
    "prefill",
    "prefill_varlen",
    "reference",
    "tbq4",
    "tbq4_append_",
    "tbq4_attention",
    "tbq4_dequantize",
    "tbq4_page_offsets_",
    "tbq4_quantize",
    "tbq4_rope_append_",
    "tbq4_rotate",
]
