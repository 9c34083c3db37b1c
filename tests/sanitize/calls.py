"""Small calls of every CUDA op, for compute-sanitizer: `python -m tests.sanitize.calls [OP,... [PART]]`.

PART is for example 2/3, every third call from the second on. With --in-range, only calls whose indices are in range;
with --leave-outputs, what an op returns is not copied back.

Inputs are made on the CPU and copied, results are copied back: no kernel but flashq's own runs, so whatever a tool
finds is flashq's, and initcheck, which also looks at the copies back, finds outputs that nothing wrote.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

import flashq

Call = tuple[tuple[Any, ...], dict[str, Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor with gaps between its rows and an unaligned base."""
    *leading, last = shape
    return _random(*leading, last + 3, dtype=dtype)[..., 1 : last + 1]


MANY = 20_011  # TBQ4 blocks: enough for the kernels that hold a block in a thread, on up to 156 multiprocessors
SPLIT = 4200  # keys: enough for every kernel to split them
BULK = ((torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 256))  # every dtype and block width


def _codec_inputs() -> Iterator[Tensor]:
    for dtype, head_dim in product(DTYPES, (64, 128, 256)):
        yield _random(5, 3, head_dim, dtype=dtype)
        yield _strided(67, 2, head_dim, dtype=dtype)
        yield _random(0, 3, head_dim, dtype=dtype)
    for dtype, head_dim in BULK:
        yield _random(MANY, head_dim, dtype=dtype)


def quantize() -> Iterator[Call]:
    for x in _codec_inputs():
        yield (x,), {}


def dequantize() -> Iterator[Call]:
    for x in _codec_inputs():
        codes, norms = flashq.tbq4_quantize(x)
        yield (codes, norms), {"dtype": x.dtype}
        if x.dim() > 2:
            yield (codes.transpose(0, 1), norms.transpose(0, 1)), {}


def rotate() -> Iterator[Call]:
    for x, inverse in product(_codec_inputs(), (False, True)):
        yield (x,), {"inverse": inverse}


def _slots(tokens: int, last: int, dtype: torch.dtype) -> Tensor:
    """Different slots up to `last`, the third one skipped."""
    slots = torch.arange(last, last - tokens, -1, dtype=dtype)
    slots[2:3] = -1
    return slots


def kv_append(beyond: int = 0) -> Iterator[Call]:
    """`beyond`: so far past the cache's end are the slots, on a GPU skipped."""
    for dtype, head_dim, page_size, index in product(DTYPES, (8, 128, 256), (1, 5, 16), (torch.int32, torch.int64)):
        k, v = _random(5, 3, head_dim, dtype=dtype), _strided(5, 3, head_dim, dtype=dtype)
        caches = [_random(16, page_size, 3, head_dim, dtype=dtype) for _ in "kv"]
        yield (k, v, *caches, _slots(5, 16 * page_size - 1 + beyond, index)), {}


def tbq4_append(beyond: int = 0) -> Iterator[Call]:
    for dtype, head_dim, page_size, offsets in product(DTYPES, (64, 128, 256), (1, 5, 16), (False, True)):
        k, v = _random(5, 3, head_dim, dtype=dtype), _strided(5, 3, head_dim, dtype=dtype)
        planes = [
            plane for _ in "kv" for plane in flashq.tbq4_quantize(_random(16, 3, page_size, head_dim, dtype=dtype))
        ]
        k_offsets = _random(16, 3, head_dim, dtype=torch.float16) if offsets else None
        yield (k, v, *planes, _slots(5, 16 * page_size - 1 + beyond, torch.int64), k_offsets), {}
    for (dtype, head_dim), offsets in product(BULK, (False, True)):
        k, pages = _random(MANY, 1, head_dim, dtype=dtype), MANY // 16 + 1
        planes = [plane for _ in "kv" for plane in flashq.tbq4_quantize(_random(pages, 1, 16, head_dim, dtype=dtype))]
        k_offsets = _random(pages, 1, head_dim, dtype=torch.float16) if offsets else None
        yield (k, k, *planes, _slots(MANY, 16 * pages - 1 + beyond, torch.int32), k_offsets), {}


def rope_append() -> Iterator[Call]:
    """Tables that vectors can read and others; with a pool and without."""
    for dtype, head_dim, pairs, page_size, pool in product(DTYPES, (64, 128, 256), (32, 11), (1, 16), (False, True)):
        q, k, v = (_random(5, heads, head_dim, dtype=dtype) for heads in (6, 3, 3))
        rows = _random if pairs == 32 else _strided
        tables = [rows(7, pairs, dtype=torch.float32 if pool else dtype) for _ in range(2)]
        positions = torch.arange(2, 7, dtype=torch.int32)
        planes = [
            plane for _ in "kv" for plane in flashq.tbq4_quantize(_random(16, 3, page_size, head_dim, dtype=dtype))
        ]
        more: list[Tensor | None] = [_random(16, 3, head_dim, dtype=torch.float16)]
        if pool:
            more += [rows(5, 4, 3, head_dim, dtype=dtype) for _ in "kv"]
            more.append(_slots(5, 19, torch.int32))
        slots = _slots(5, 16 * page_size - 1, torch.int64)
        yield (q, k, v, *tables, positions, *planes, slots, *more), {"interleaved": page_size == 1}
    for dtype, head_dim in BULK:  # a prompt
        q, k = (_random(1030, heads, head_dim, dtype=dtype) for heads in (3, 1))
        planes = [plane for _ in "kv" for plane in flashq.tbq4_quantize(_random(65, 1, 16, head_dim, dtype=dtype))]
        tables, slots = [_random(7, 24, dtype=dtype) for _ in range(2)], _slots(1030, 1039, torch.int32)
        pool = [_random(65, 16, 1, head_dim, dtype=dtype) for _ in "kv"]
        yield (q, k, k, *tables, torch.arange(1030) % 7, *planes, slots, None, *pool, slots), {}


def page_offsets(beyond: int = 0) -> Iterator[Call]:
    """Two sequences; the pages of the first are partly gone from the table. `beyond` is added to lengths and pages."""
    for dtype, head_dim, page_size, pool in product(DTYPES, (64, 128, 256), (1, 16, 40), (False, True)):
        k = (_strided if pool else _random)(45, 3, head_dim, dtype=dtype)
        codes, norms = flashq.tbq4_quantize(_random(200, 3, page_size, head_dim, dtype=dtype))
        offsets = _random(200, 3, head_dim, dtype=torch.float16)
        lengths = torch.tensor([81 + beyond, 41])
        table = torch.arange(200).view(2, 100) + beyond
        table[0, 1] = -1
        more = (None, _random(4, 16, 3, head_dim, dtype=dtype), torch.arange(8).view(2, 4)) if pool else ()
        yield (k, codes, norms, offsets, lengths, table, torch.tensor([0, 4, 45]), *more), {}


def merge() -> Iterator[Call]:
    for dtype, partials, head_dim in product(DTYPES, (1, 2, 9), (1, 72, 128)):
        lses = _random(partials, 3, 5, dtype=torch.float32)
        lses[0, 1] = -torch.inf
        yield (_random(partials, 5, 3, head_dim, dtype=dtype), lses), {}
        yield (_strided(partials, 5, 3, head_dim, dtype=dtype), _strided(partials, 3, 5, dtype=torch.float32)), {}
    yield (torch.empty(0, 5, 3, 128), torch.empty(0, 3, 5)), {}
    yield (torch.empty(2, 1, 1, 0), torch.zeros(2, 1, 1)), {}


def _attention_inputs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D), on a GPU 16-bit only. Rows that TMA and 16-byte loads can read, and
    others; several tiles of rows and of keys."""
    for dtype, head_dim, q_len, rows in product(DTYPES[1:], (8, 64, 128, 256), (1, 70), (_random, _strided)):
        q, k = _random(2, q_len, 6, head_dim, dtype=dtype), rows(2, 131, 2, head_dim, dtype=dtype)
        yield q, k, _random(2, 131, 2, head_dim, dtype=dtype)
    for (dtype, head_dim), rows in product(
        zip((*DTYPES[1:], DTYPES[1]), (64, 128, 256), strict=True), (_random, _strided)
    ):
        q, k = _random(1, 290, 3, head_dim, dtype=dtype), rows(1, 450, 1, head_dim, dtype=dtype)
        yield q, k, _random(1, 450, 1, head_dim, dtype=dtype)


def _few_queries() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype, head_dim, rows in product(DTYPES[1:], (64, 128, 256), (_random, _strided)):
        k = rows(1, SPLIT, 1, head_dim, dtype=dtype)
        yield _random(1, 5, 4, head_dim, dtype=dtype), k, _random(1, SPLIT, 1, head_dim, dtype=dtype)


def prefill() -> Iterator[Call]:
    sinks = _random(6, dtype=torch.float32)
    for q, k, v in _attention_inputs():
        yield (q, k, v), {"causal": True}
        yield (q, k, v, sinks[: q.shape[2]]), {"window_left": 40, "window_right": 9, "softcap": 20.0}
        yield (q, k[:, :0], v[:, :0]), {}
    for q, k, v in _few_queries():
        yield (q, k, v), {"causal": True}


def prefill_varlen() -> Iterator[Call]:
    for q, k, v in _attention_inputs():
        q, k, v = (x[0] for x in (q, k, v))
        queries = torch.tensor([0, 0, len(q) // 2, len(q)], dtype=torch.int32)
        yield (q, k, v, queries, torch.tensor([0, 50, 50, len(k)])), {"causal": True}


def decode() -> Iterator[Call]:
    """A sequence of all its pages but one token, and a short one; long ones without a table, packed ones too. Page
    sizes and chunks take turns: under racecheck a call takes most of a second."""
    for i, (q, k, v) in enumerate(_attention_inputs()):
        page_size, chunk = (1, 16, 50)[i % 3], (0, 256)[i % 2]
        pages = k.shape[1] // page_size
        caches = [x[:, : pages * page_size].reshape(len(x) * pages, page_size, *x.shape[2:]) for x in (k, v)]
        table = torch.arange(len(q) * pages, dtype=torch.int32).flip(0).view(len(q), pages)
        yield (q, *caches, torch.tensor([pages * page_size - 1, 3][: len(q)]), table), {"kv_chunk": chunk}
    for i, (q, k, v) in enumerate(_few_queries()):
        length = torch.tensor([SPLIT - 1])
        yield (q, k, v, length), {"kv_chunk": (0, 512)[i % 2]}
        yield (q[0], k, v, length, None, torch.tensor([0, q.shape[1]])), {"kv_chunk": (512, 0)[i % 2]}


def tbq4_attention() -> Iterator[Call]:
    """Pages that 16-byte copies can read and others, few rows and many, all there is and nothing of it, short and
    split."""
    for head_dim, page_size, q_len, length, more in product(
        (64, 128, 256), (16, 7), (1, 9, 256), (131, 1900), (False, True)
    ):
        pages, dtype = -(-length // page_size), DTYPES[1 + more]
        k, v = (_random(pages, page_size, 2, head_dim, dtype=dtype) for _ in "kv")
        planes = [plane for x in (k, v) for plane in flashq.tbq4_quantize(x.transpose(1, 2))]
        table, q = torch.arange(pages).flip(0)[None], _random(1, q_len, 6, head_dim, dtype=dtype)
        options: dict[str, Any] = {}
        if more:
            options = {"k_offsets": _random(pages, 2, head_dim, dtype=torch.float16), "exact_k": k, "exact_v": v}
            options |= {"exact_block_table": table, "exact_first": 4, "exact_last": 64, "softcap": 20.0}
        yield (q, *planes, torch.tensor([length]), table), options


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "tbq4_quantize": quantize,
    "tbq4_dequantize": dequantize,
    "tbq4_rotate": rotate,
    "kv_append_": kv_append,
    "tbq4_append_": tbq4_append,
    "tbq4_rope_append_": rope_append,
    "tbq4_page_offsets_": page_offsets,
    "merge_states": merge,
    "prefill": prefill,
    "prefill_varlen": prefill_varlen,
    "decode": decode,
    "tbq4_attention": tbq4_attention,
}


def _move_indices(op: str) -> Iterator[Call]:
    """The calls of an op with every value of its index tensors far above, then far below, what there is."""

    def moved(x: Any, by: int) -> Any:
        return x + by if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) else x

    for (arguments, options), by in product(CALLS[op](), (10**6, -(10**6))):
        yield tuple(moved(x, by) for x in arguments), {name: moved(x, by) for name, x in options.items()}


# What the CPU refuses and a GPU, which cannot tell without waiting, has to survive.
OUT_OF_RANGE: dict[str, Callable[[], Iterator[Call]]] = {
    "kv_append_": lambda: kv_append(beyond=2),
    "tbq4_append_": lambda: tbq4_append(beyond=2),
    "tbq4_rope_append_": lambda: _move_indices("tbq4_rope_append_"),
    "tbq4_page_offsets_": lambda: page_offsets(beyond=10**6),
    "prefill_varlen": lambda: _move_indices("prefill_varlen"),
    "decode": lambda: _move_indices("decode"),
    "tbq4_attention": lambda: _move_indices("tbq4_attention"),
}


def to_gpu(x: Any) -> Any:
    """A tensor with the same strides at the same place of a storage of the same size; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.cuda().as_strided(x.size(), x.stride(), x.storage_offset())


def run(op: str, call: Call, leave_outputs: bool = False) -> None:
    """One call on the GPU; its outputs, unless they are left there, and the tensors it may write come back."""
    arguments, options = call
    moved = [to_gpu(argument) for argument in arguments]
    options = {name: to_gpu(option) for name, option in options.items()}
    try:
        outputs = getattr(torch.ops.flashq, op)(*moved, **options)
    except RuntimeError as error:
        if " of an earlier " not in str(error):  # FLASHQ_CHECK=1 tells of the call before, once
            raise
        outputs = getattr(torch.ops.flashq, op)(*moved, **options)
    returned = () if leave_outputs else outputs if isinstance(outputs, tuple) else (outputs,)
    for tensor in [*returned, *moved]:
        if isinstance(tensor, Tensor) and tensor.is_contiguous():
            tensor.cpu()


def main(ops: str = "", part: str = "1/1", in_range: bool = False, leave_outputs: bool = False) -> None:
    number, parts = (int(x) for x in part.split("/"))
    total = 0
    for op in ops.split(",") if ops else CALLS:
        for table in (CALLS,) if in_range else (CALLS, OUT_OF_RANGE):
            count, start = 0, time.perf_counter()
            for call in islice(table.get(op, list)(), number - 1, None, parts):
                run(op, call, leave_outputs)
                count += 1
            torch.cuda.synchronize()
            what = op if table is CALLS else f"{op} out of range"
            print(f"sanitize: {what}: {count} calls, {time.perf_counter() - start:.1f} s", flush=True)
            total += count
    print(f"sanitize: {total} calls done", flush=True)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    with torch.inference_mode():
        main(*words, in_range="--in-range" in sys.argv, leave_outputs="--leave-outputs" in sys.argv)
