"""TBQ4, the 4-bit format of a KV cache: its tables, its byte blocks, and what error to expect.

A row of ``head_dim`` values is cut into blocks of ``block_width(head_dim)``; each block is rotated by a signed Hadamard
transform, every rotated value becomes a 4-bit index into 16 fixed levels, and one fp16 norm is kept. The ops work on
two planes, ``codes`` uint8 (..., head_dim / 2) and ``norms`` fp16 (..., head_dim / block_width); `to_blocks` and
`from_blocks` convert to and from the interleaved blocks of files.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = [
    "CENTROIDS",
    "EDGES",
    "EXPECTED_ERROR",
    "FINGERPRINT",
    "HEAD_DIMS",
    "block_bytes",
    "block_width",
    "fingerprint",
    "from_blocks",
    "key_bias_ratio",
    "page_offsets",
    "to_blocks",
]

HEAD_DIMS = (64, 128, 256)

# Bit i of a mask (value 2**i) belongs to element i of the block; a set bit negates the element.
SIGN_IN = 0x49F250A9A4C63BBB42F85949E46A0359  # s1, before the transform
SIGN_OUT = 0xBEA56562B7A5357A3F628FDC16ACEE90  # s2, after it

_UPPER_CENTROIDS = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
_UPPER_MIDPOINTS = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)


def _mirror(upper: tuple[float, ...], middle: tuple[float, ...] = ()) -> Tensor:
    values = [-x for x in reversed(upper)] + list(middle) + list(upper)
    return torch.tensor(values, dtype=torch.float32, device="cpu")


# The 16 levels in ascending order, by block width; the narrower block's are larger by sqrt 2. fp32.
CENTROIDS: dict[int, Tensor] = {128: _mirror(_UPPER_CENTROIDS)}
CENTROIDS[64] = (CENTROIDS[128].double() * 2.0**0.5).float()
# The 15 boundaries between levels, for the un-normalised transform of a unit vector; the same for both widths. fp32.
EDGES: Tensor = (_mirror(_UPPER_MIDPOINTS, (0.0,)).double() * 128.0**0.5).float()
# Squared centroids in fixed point, and the scale that undoes it: the norm of the levels does not depend on an order.
SQUARES: Tensor = (CENTROIDS[128].double() ** 2 * 2.0**28).round().to(torch.int64)
SQUARES_SCALE = {128: 2.0**-28, 64: 2.0**-27}

OFFSET_WINDOW = 64  # keys before a page that `page_offsets` averages

FINGERPRINT = "dbe9ab17e320d84f"

# Mean of |x - decoded|^2 / |x|^2 over 40,000 random rows, by kind of data and head_dim (standard error 1e-5).
# The error of an inner product <q, decoded> has a standard deviation of sqrt(error / head_dim) * |q| * |x|.
EXPECTED_ERROR: dict[str, dict[int, float]] = {
    "gaussian": {64: 0.00888, 128: 0.00919, 256: 0.00920},
    "laplace": {64: 0.00870, 128: 0.00907, 256: 0.00905},
    "student-t, 3 degrees": {64: 0.00859, 128: 0.00890, 256: 0.00886},
    "gaussian + 3": {64: 0.00863, 128: 0.00962, 256: 0.00961},
    "every 32nd channel x20": {64: 0.00796, 128: 0.00820, 256: 0.00817},
    "one channel + 600": {64: 0.00018, 128: 0.00035, 256: 0.00036},
}


def block_width(head_dim: int) -> int:
    """Values in one block: 64 for head_dim 64, 128 for 128 and 256. Raises ValueError for any other size."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"flashq.tbq4: head_dim: expected 64, 128 or 256, got {head_dim}")
    return 64 if head_dim == 64 else 128


def block_bytes(head_dim: int) -> int:
    """Bytes of one block: 66 for head_dim 128 and 256 (which has two), 34 for 64."""
    return 2 + block_width(head_dim) // 2


def fingerprint() -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the tables, computed; equal to FINGERPRINT.

    Hashed are both sign masks (16 bytes each, little endian), the centroids of width 128 and the edges (fp32, little
    endian). Store it with head_dim and block width in the header of a saved cache: other projects use the name TBQ4
    for other tables.
    """
    digest = hashlib.sha256(SIGN_IN.to_bytes(16, "little") + SIGN_OUT.to_bytes(16, "little"))
    for table in (CENTROIDS[128], EDGES):
        digest.update(table.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]


def to_blocks(codes: Tensor, norms: Tensor) -> Tensor:
    """Interleave planes to byte blocks, losslessly (NaN norms keep their payload).

    Args:
        codes: uint8 (..., head_dim / 2).
        norms: fp16 (..., head_dim / block_width), the same leading dimensions.

    Returns:
        uint8 (..., head_dim / block_width, 66), or 34 bytes a block for head_dim 64: the fp16 norm, little endian, then
        the block's codes.

    Raises:
        ValueError: shapes or dtypes that are no planes.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise ValueError(
            f"flashq.tbq4.to_blocks: codes: expected uint8 (..., head_dim / 2), got {codes.dtype} {tuple(codes.shape)}"
        )
    head_dim = 2 * codes.shape[-1]
    blocks = head_dim // block_width(head_dim)
    if norms.dtype != torch.float16 or norms.shape != (*codes.shape[:-1], blocks):
        raise ValueError(
            f"flashq.tbq4.to_blocks: norms: expected float16 {(*codes.shape[:-1], blocks)}, "
            f"got {norms.dtype} {tuple(norms.shape)}"
        )
    head = norms.contiguous().unsqueeze(-1).view(torch.uint8)  # every host of torch's wheels is little endian
    return torch.cat([head, codes.reshape(*norms.shape, codes.shape[-1] // blocks)], dim=-1)


def from_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Split byte blocks into planes; the inverse of `to_blocks` on every bit pattern.

    Args:
        blocks: uint8 (..., 1, 34) for head_dim 64, (..., 1, 66) for 128, (..., 2, 66) for 256.

    Returns:
        codes uint8 (..., head_dim / 2) and norms fp16 (..., head_dim / block_width), contiguous.

    Raises:
        ValueError: a dtype or a shape that is none of these.
    """
    if blocks.dtype != torch.uint8 or blocks.dim() < 2 or tuple(blocks.shape[-2:]) not in ((1, 34), (1, 66), (2, 66)):
        raise ValueError(
            "flashq.tbq4.from_blocks: blocks: expected uint8 (..., 1, 34), (..., 1, 66) or (..., 2, 66), "
            f"got {blocks.dtype} {tuple(blocks.shape)}"
        )
    norms = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return blocks[..., 2:].contiguous().flatten(-2), norms


def key_bias_ratio(k: Tensor) -> Tensor:
    """How much of the keys is one constant vector: norm(mean key) / mean norm(key), fp32 (Hkv).

    Near 0 for keys without a bias, 1 where they all are the same. Above about 0.9 plain 4-bit keys destroy a model
    although the error per vector looks the same as ever; page offsets (``k_offsets``) repair it.

    Args:
        k: (T, Hkv, head_dim), T >= 1, any floating dtype.
    """
    keys = k.float()
    return keys.mean(0).norm(dim=-1) / keys.norm(dim=-1).mean(0).clamp_min(torch.finfo(torch.float32).tiny)


def page_offsets(k: Tensor, start: int, page_size: int, previous: Tensor | None = None) -> tuple[int, Tensor]:
    """Key offsets of the pages that an append opens, for ``k_offsets`` of `tbq4_append_` and `tbq4_attention`.

    A page's offset is fixed when its first token is appended: the mean of this append's keys in the page if they fill
    it, or if no earlier key exists; otherwise the mean of the last 64 keys before the page, or of as many as there are.
    So it never waits for tokens to come, and on the first page, where a zero offset would cost most, it is never zero.

    Args:
        k: (T, Hkv, D), the keys of this append in order, any floating dtype.
        start: position of the first of them in its sequence, in tokens.
        page_size: tokens a page.
        previous: (R, Hkv, D), the last R keys before `start`, at least min(64, start) of them; None when start is 0.

    Returns:
        The index within the sequence of the first page opened, and the offsets fp16 (opened pages, Hkv, D) of it and
        the pages after it; values beyond fp16's range are clamped to it.

    Raises:
        ValueError: fewer previous keys than the rule needs, a negative start or a page size below 1.
    """
    if start < 0 or page_size < 1:
        raise ValueError(
            f"flashq.tbq4.page_offsets: start, page_size: expected >= 0 and >= 1, got {start} and {page_size}"
        )
    first = -(-start // page_size)
    end = start + k.shape[0]
    known = k.float()
    begin = start  # position of known[0]
    if start > 0 and previous is not None:
        tail = previous[-OFFSET_WINDOW:]
        known, begin = torch.cat([tail.float(), known]), start - tail.shape[0]
    offsets = []
    for page in range(first, -(-end // page_size)):
        opening = page * page_size
        if opening == 0 or end >= opening + page_size:
            keys = known[opening - begin : opening + page_size - begin]
        else:
            wanted = min(OFFSET_WINDOW, opening)
            if opening - begin < wanted:
                raise ValueError(
                    f"flashq.tbq4.page_offsets: previous: expected the last {min(OFFSET_WINDOW, start)} keys before "
                    f"position {start}, got {start - begin}"
                )
            keys = known[opening - wanted - begin : opening - begin]
        offsets.append(keys.mean(0))
    limit = torch.finfo(torch.float16).max
    stacked = torch.stack(offsets) if offsets else known.new_zeros(0, *k.shape[1:])
    return first, stacked.clamp(-limit, limit).half()
