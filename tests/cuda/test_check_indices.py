"""FLASHQ_CHECK=1 on CUDA: what index tensors must not hold raises at the next call, in the words of the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from arguments import INDEX_VALUES, bad
from cases import ATTENTION, ON_CUDA
from test_process import run

import flashq

pytestmark = pytest.mark.cuda

ROWS = [row for row in INDEX_VALUES if row[0] not in ATTENTION or row[0] in ON_CUDA]
START = """
    import torch, flashq
    from arguments import bad
    from cases import move

    def attempt(op, arguments):
        try:
            getattr(flashq, op)(**{name: move(x, "cuda") for name, x in arguments.items()})
        except RuntimeError as error:
            print(error)

    def next_call():
        x = torch.zeros(1, 1, 1, 8, device="cuda")
        attempt("merge_states", {"outs": x, "lses": x[..., 0]})
"""


def cpu_message(op: str, name: str, values: list) -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(flashq, op)(**bad(op, name, values))
    return str(caught.value)


@pytest.mark.contract(9, 16)
def test_every_value_raises_at_the_next_call() -> None:
    code = (
        START
        + f"""
    for index_dtype in (torch.int32, torch.int64):
        for op, name, values in {[row[:3] for row in ROWS]}:
            attempt(op, bad(op, name, values, index_dtype))
            next_call()
            next_call()
    """
    )
    expected = []
    for op, name, values, *_ in ROWS:
        argument, rest = cpu_message(op, name, values).removeprefix(f"flashq::{op}: ").split(": ", 1)
        expected.append(f"flashq::merge_states: {argument} of an earlier {op}: {rest}")
    with ThreadPoolExecutor() as pool:  # most of the time of either process is its start
        checked, unchecked = pool.map(lambda check: run(code, FLASHQ_CHECK=check), "10")
    assert checked.splitlines() == 2 * expected
    assert unchecked == ""


@pytest.mark.contract(9)
def test_the_first_of_many_is_named() -> None:
    """Several of thousands of sequences, table entries and slots; a table that is right where it is needed."""
    code = (
        START
        + """
    cache, q = torch.zeros(9, 16, 1, 64).half(), torch.zeros(3000, 1, 1, 64).half()
    lengths, table = torch.full((3000,), 16), torch.zeros(3000, 1, dtype=torch.int32)
    lengths[[700, 2500, 40, 2999]] = torch.tensor([-1, 99, 17, 17])
    common = {"k_cache": cache, "v_cache": cache}
    attempt("decode", common | {"q": q, "seqlens": lengths, "block_table": table})
    next_call()
    table = torch.zeros(2, 5000, dtype=torch.int32)
    table[1, [4000, 1700, 2900]] = torch.tensor([9, -1, 10], dtype=torch.int32)
    table[0, 4999] = table[1, :20] = -5  # past the length; before kv_start
    more = {"seqlens": torch.tensor([79983, 80000]), "block_table": table, "kv_start": torch.tensor([0, 320])}
    attempt("decode", common | {"q": q[:2]} | more)
    next_call()
    attempt("decode", common | {"q": q[:2], "window_left": 16 * 1050} | more)
    next_call()
    slots = torch.full((5000,), -7)
    slots[[4500, 1800, 3000]] = torch.tensor([2**40, 144, 145])
    keys = q[:1, 0].expand(5000, 1, 64)
    attempt("kv_append_", common | {"k": keys, "v": keys, "slots": slots})
    next_call()
    ends = {"cu_seqlens_q": torch.tensor([0, 1, 4, 3, 2, 9]), "seqlens": torch.tensor([99, 16, 16, 16, 16])}
    attempt("decode", common | {"q": q[:4, 0]} | ends)
    next_call()
    attempt("decode", common | {"q": q[:4, 0]} | ends | {"seqlens": torch.tensor([9, 16, 16, 16, 16])})
    next_call()
    attempt("decode", common | {"q": q[:4, 0], "cu_seqlens_q": torch.tensor([3]), "seqlens": torch.zeros(0).int()})
    next_call()
    """
    )
    expected = [
        "seqlens[40] of an earlier decode: expected a length from 0 to the capacity of 16, got 17",
        "block_table[1, 1700] of an earlier decode: expected a page from 0 to 8, got -1",
        "block_table[1, 4000] of an earlier decode: expected a page from 0 to 8, got 9",
        "slots[1800] of an earlier kv_append_: expected a slot below the cache's 144 (or negative: skip), got 144",
        "seqlens[0] of an earlier decode: expected a length from 0 to the capacity of 16, got 99",
        "cu_seqlens_q[3] of an earlier decode: expected a value from 4 (the one before) to 4 (all tokens), got 3",
        "cu_seqlens_q[0] of an earlier decode: expected 0, got 3",
    ]
    assert run(code, FLASHQ_CHECK="1").splitlines() == [f"flashq::merge_states: {line}" for line in expected]


GRAPH = (
    START
    + """
    k, cache = torch.ones(3, 1, 64, device="cuda").half(), torch.zeros(2, 4, 1, 64, device="cuda").half()
    slots, lengths = (torch.tensor(x, device="cuda") for x in ([0, 1, 50], [3, 9]))
    graph = torch.cuda.CUDAGraph()
"""
)
SLOT = "slots[2] of an earlier kv_append_: expected a slot below the cache's 8 (or negative: skip), got"


@pytest.mark.contract(9, 12)
def test_graphs() -> None:
    """Neither a capture nor a replay raises; the call after a replay does, whatever the stream."""
    code = (
        GRAPH
        + """
    flashq.decode(k[:2, None], cache, cache, lengths * 0)
    flashq.kv_append_(k, k, cache, cache, slots - 1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flashq.kv_append_(k, k, cache, cache, slots)
        flashq.decode(k[:2, None], cache, cache, lengths)
    print("captured")
    next_call()
    graph.replay()
    next_call()
    slots.clamp_(max=7)
    graph.replay()
    next_call()
    lengths.clamp_(max=4)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
        next_call()
        slots.fill_(8)
        graph.replay()
        next_call()
    """
    )
    captured, *raised = run(code, FLASHQ_CHECK="1").splitlines()
    assert captured == "captured"
    length = "seqlens[1] of an earlier decode: expected a length from 0 to the capacity of 4, got 9"
    expected = [f"{SLOT} 49", f"{SLOT} 50", length, f"{SLOT.replace('[2]', '[0]')} 8"]
    assert raised == [f"flashq::merge_states: {line}" for line in expected]


@pytest.mark.contract(9, 12)
def test_the_first_call_may_be_captured() -> None:
    code = (
        GRAPH
        + """
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flashq.kv_append_(k, k, cache, cache, slots)
    graph.replay()
    next_call()
    print(int(cache.sum()))
    """
    )
    assert run(code, FLASHQ_CHECK="1").splitlines() == [f"flashq::merge_states: {SLOT} 50", "128"]


@pytest.mark.contract(9)
def test_a_stream_of_another_device() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU")
    code = (
        START
        + """
    k, cache = torch.ones(1, 1, 64), torch.zeros(1, 4, 1, 64)
    arguments = {"k": k, "v": k, "k_cache": cache, "v_cache": cache, "slots": torch.tensor([5])}
    flashq.kv_append_(**{name: x.to("cuda:1") for name, x in arguments.items()})
    next_call()
    print("device 1")
    x = torch.zeros(1, 1, 1, 8, device="cuda:1")
    attempt("merge_states", {"outs": x, "lses": x[..., 0]})
    """
    )
    first, second = run(code, FLASHQ_CHECK="1").splitlines()
    assert first == "device 1"
    assert second.startswith("flashq::merge_states: slots[0] of an earlier kv_append_: ")
