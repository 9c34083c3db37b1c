"""What the CUDA library asks for beside a call's tensors."""

from __future__ import annotations

import ctypes

import pytest

import flashq

pytestmark = pytest.mark.skipif(flashq.libraries.cuda_problem is not None, reason="no CUDA library")


@pytest.mark.contract(12)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(24, 4, 256), (32, 8, 128), (9, 3, 64), (64, 64, 256)])
def test_tbq4_scratch_is_bounded(q_heads: int, kv_heads: int, head_dim: int, offsets: bool) -> None:
    """At any length of a query, with no GPU."""
    scratch_bytes = ctypes.CDLL(str(flashq.libraries.folder / "libflashq_cuda.so")).flashq_cuda_tbq4_scratch_bytes
    scratch_bytes.restype = ctypes.c_int64
    scratch_bytes.argtypes = [*(ctypes.c_int64,) * 6, ctypes.c_int32]
    lengths = (1, 16, 17, 100, 256, 333, 512, 700, 1066, 2048, 4096)
    for batch, q_len in [*((1, n) for n in lengths), (8, 64), (64, 1)]:
        sizes = [scratch_bytes(batch, q_len, q_heads, kv_heads, head_dim, 1 << i, offsets) for i in (12, 18, 22)]
        assert sizes[1] == sizes[2]
        rows = batch * q_len * q_heads
        # Three 16-bit copies of the queries, facts of each row, and partial results.
        assert max(sizes) <= rows * (3 * head_dim * 2 + 20) + (52 << 20)
        if head_dim == 256 and q_heads == 24 and batch == 1 and q_len <= 512:
            assert max(sizes) + 2 * rows * head_dim * 2 <= 64 << 20
