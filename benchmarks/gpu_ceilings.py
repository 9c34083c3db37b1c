"""The ceilings of the current GPU: reads and copies by gpu_probes.cu, bf16 products by torch.matmul."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.gpu_graphs import capture, time_in_turns
from benchmarks.gpu_probes import copy, read

MATMUL_SIZE = 8192
STREAM_BYTES = 1 << 30
COPY_PIECES = 8  # on an H200 torch copies 150 MB at 4.2 TB/s in a graph, but a GiB at 2.8

T = TypeVar("T")


def _seconds(call: Callable[[], object]) -> float:
    """In a graph, as the rows are timed: what is fastest on a stream need not be so there."""
    return statistics.median(time_in_turns({"call": capture([call])}, seconds=0.0)["call"])


@dataclass
class Ceiling:
    """A call that does as much `work` (bytes, floating-point operations) a second as the GPU can."""

    call: Callable[[], object]
    work: float

    def rate(self) -> float:
        """Work a second."""
        return self.work / _seconds(self.call)


class Ceilings:
    """The ceilings of one run, over random data; each is set up when it is first asked for.

    Of several access patterns, or sizes, the fastest is taken, because a ceiling that a kernel beats is none.
    """

    def __init__(self, stream_bytes: int = STREAM_BYTES, matmul_size: int = MATMUL_SIZE) -> None:
        self._bytes = stream_bytes
        self._matmul_size = matmul_size

    @functools.cached_property
    def _data(self) -> Tensor:
        return torch.randn(self._bytes // 2, device="cuda", dtype=torch.bfloat16)

    @functools.cached_property
    def read(self) -> Ceiling:
        sink = torch.empty(16, device="cuda", dtype=torch.uint8)
        patterns = [
            functools.partial(read, self._data, sink, blocks, unroll) for blocks in (2, 4, 8, 32) for unroll in (4, 8)
        ]
        return Ceiling(min(patterns, key=_seconds), self._data.nbytes)

    @functools.cached_property
    def copy(self) -> Ceiling:
        target = torch.empty_like(self._data)
        patterns: list[Callable[[], object]] = [
            functools.partial(copy, self._data, target, blocks, unroll) for blocks in (2, 4, 8, 32) for unroll in (4, 8)
        ]
        pieces = list(zip(target.chunk(COPY_PIECES), self._data.chunk(COPY_PIECES), strict=True))
        patterns.append(lambda: [to.copy_(source) for to, source in pieces])
        return Ceiling(min(patterns, key=_seconds), 2.0 * self._data.nbytes)

    @functools.cached_property
    def matmul(self) -> Ceiling:
        a, b = (torch.randn(self._matmul_size**2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def product_of(size: int) -> Ceiling:
            factors = [x[: size * size].view(size, size) for x in (a, b, out)]
            return Ceiling(lambda: torch.mm(*factors[:2], out=factors[2]), 2.0 * size**3)

        return max((product_of(self._matmul_size * eighths // 8) for eighths in (4, 5, 6, 8)), key=Ceiling.rate)

    def rates(self) -> dict[str, float]:
        """Each ceiling's work a second, for the header."""
        return {f"{name}_rate": getattr(self, name).rate() for name in ("read", "copy", "matmul")}


def under_load(ceilings: Ceilings, look: Callable[[], T], seconds: float = 1.0) -> T:
    """Call `look` while the GPU multiplies matrices for about `seconds`."""
    for _ in range(math.ceil(seconds * ceilings.matmul.rate() / ceilings.matmul.work)):
        ceilings.matmul.call()
    found = look()
    torch.cuda.synchronize()
    return found
