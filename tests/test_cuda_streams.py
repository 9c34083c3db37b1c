"""What the contract promises of every CUDA op beyond its numbers: streams, graphs, devices, sizes, what the host pays.

An op that is new on CUDA gets a line in INPUTS, and one in LARGE, for every kernel of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ON_CUDA, lay_out, move, randn
from torch import Tensor

pytestmark = pytest.mark.cuda

Inputs = dict[str, Any]


def merge_inputs(seed: int, device: str) -> Inputs:
    outs, lses = randn(5, 3, 70, 4, 64, dtype=torch.bfloat16, seed=seed), 4 * randn(5, 3, 4, 70, seed=seed + 1)
    return {"outs": outs.to(device), "lses": lses.to(device)}


def append_inputs(seed: int, device: str) -> Inputs:
    """64 slots among 128, another choice for every seed."""
    k, v = (randn(64, 4, 128, dtype=torch.float16, seed=seed + i).to(device) for i in range(2))
    k_cache, v_cache = torch.zeros(2, 8, 16, 4, 128, dtype=torch.float16, device=device)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:64].to(device)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}


def codec_inputs(seed: int, device: str, rows: int = 100) -> Inputs:
    return {"x": randn(rows, 3, 128, dtype=torch.bfloat16, seed=seed).to(device)}


def code_inputs(seed: int, device: str, rows: int = 100) -> Inputs:
    codes, norms = torch.ops.flashq.tbq4_quantize(codec_inputs(seed, "cpu", rows)["x"])
    return {"codes": codes.to(device), "norms": norms.to(device)}


def tbq4_append_inputs(seed: int, device: str, tokens: int = 64) -> Inputs:
    """As append_inputs, with a page for every 8 tokens."""
    k, v = (randn(tokens, 4, 128, dtype=torch.float16, seed=seed + i).to(device) for i in range(2))
    slots = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(seed))[:tokens].to(device)
    inputs = {"k": k, "v": v, "slots": slots}
    for name in ("k", "v"):
        inputs[f"{name}_codes"] = torch.zeros(tokens // 8, 4, 16, 64, dtype=torch.uint8, device=device)
        inputs[f"{name}_norms"] = torch.zeros(tokens // 8, 4, 16, 1, dtype=torch.float16, device=device)
    return inputs | {"k_offsets": randn(tokens // 8, 4, 128, dtype=torch.float16, seed=seed).to(device)}


def rope_append_inputs(seed: int, device: str, tokens: int = 64) -> Inputs:
    """As tbq4_append_inputs, with an exact pool of slots of its own."""
    inputs = tbq4_append_inputs(seed, device, tokens)
    angle = torch.arange(300)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    tables["positions"] = torch.randint(0, 300, (tokens,), generator=torch.Generator().manual_seed(seed))
    tables["exact_slots"] = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)) - 5
    tables["q"] = randn(tokens, 8, 128, dtype=torch.float16, seed=seed + 2)
    pools = {f"exact_{name}": torch.zeros(tokens // 4, 4, 4, 128, dtype=torch.float16, device=device) for name in "kv"}
    return inputs | pools | {name: x.to(device) for name, x in tables.items()}


def page_offsets_inputs(seed: int, device: str) -> Inputs:
    """Two sequences that open pages, the second with its first keys."""
    codes, norms = (x.to(device) for x in torch.ops.flashq.tbq4_quantize(randn(16, 4, 16, 128, seed=seed)))
    inputs = {"k": randn(64, 4, 128, dtype=torch.float16, seed=seed), "seqlens": torch.tensor([70 + seed, 40])}
    inputs |= {"k_offsets": randn(16, 4, 128, dtype=torch.float16, seed=seed), "cu_seqlens": torch.tensor([0, 24, 64])}
    inputs["block_table"] = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).view(2, 8)
    return {"k_codes": codes, "k_norms": norms} | {name: x.to(device) for name, x in inputs.items()}


def prefill_inputs(seed: int, device: str, layout: str = "contiguous") -> Inputs:
    shapes = {"q": (2, 300, 4, 128), "k": (2, 1111, 2, 128), "v": (2, 1111, 2, 128)}
    tensors = {name: randn(*shape, dtype=torch.bfloat16, seed=seed) for name, shape in shapes.items()}
    return {name: move(lay_out(x, layout), device) for name, x in tensors.items()}


def varlen_inputs(seed: int, device: str, layout: str = "contiguous") -> Inputs:
    inputs = {name: x.flatten(0, 1) for name, x in prefill_inputs(seed, "cpu").items()}
    inputs = {name: move(lay_out(x, layout), device) for name, x in inputs.items()}
    cu_q, cu_k = torch.tensor([0, 37 * seed, 590]), torch.tensor([0, 300 * seed, 2222])
    return inputs | {"cu_seqlens_q": cu_q.to(device), "cu_seqlens_k": cu_k.to(device)}


def decode_inputs(seed: int, device: str, q_len: int = 1) -> Inputs:
    """One long and one short sequence, their pages shuffled: the long one is split."""
    cache = randn(2, 300, 16, 2, 64, dtype=torch.bfloat16, seed=seed)
    inputs = {"q": randn(2, q_len, 8, 64, dtype=torch.bfloat16, seed=seed), "k_cache": cache[0], "v_cache": cache[1]}
    table = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).view(1, 300).expand(2, 300).int()
    inputs |= {"seqlens": torch.tensor([4800 - 700 * seed, 100 * seed]), "block_table": table.contiguous()}
    return {name: x.to(device) for name, x in inputs.items()}


def tbq4_inputs(seed: int, device: str, q_len: int = 1, offsets: bool = True, exact: bool = True) -> Inputs:
    """As decode_inputs, the first and the last tokens from an exact pool."""
    cache = decode_inputs(seed, "cpu", q_len)
    inputs = {"q": cache["q"], "seqlens": cache["seqlens"], "block_table": cache["block_table"]}
    for name in "kv":
        codes, norms = torch.ops.flashq.tbq4_quantize(cache[f"{name}_cache"].transpose(1, 2))
        inputs |= {f"{name}_codes": codes, f"{name}_norms": norms}
    if offsets:
        inputs["k_offsets"] = randn(300, 2, 64, dtype=torch.float16, seed=seed)
    if exact:
        inputs |= {"exact_k": cache["k_cache"], "exact_v": cache["v_cache"], "exact_block_table": cache["block_table"]}
    inputs = {name: x.to(device) for name, x in inputs.items()}
    return inputs | ({"exact_first": 4, "exact_last": 64} if exact else {})


def with_options(make: Callable[..., Inputs], **options: Any) -> Callable[[int, str], Inputs]:
    return lambda seed, device: make(seed, device, **options)


# The first word is the op.
INPUTS: dict[str, Callable[[int, str], Inputs]] = {
    "decode": decode_inputs,
    "decode of many queries": with_options(decode_inputs, q_len=40),
    "kv_append_": append_inputs,
    "merge_states": merge_inputs,
    "prefill": prefill_inputs,
    "prefill of unaligned rows": with_options(prefill_inputs, layout="padded"),
    "prefill_varlen": varlen_inputs,
    "prefill_varlen of unaligned rows": with_options(varlen_inputs, layout="padded"),
    "tbq4_append_": tbq4_append_inputs,
    "tbq4_append_ of many tokens": with_options(tbq4_append_inputs, tokens=5000),
    "tbq4_attention": with_options(tbq4_inputs, offsets=False, exact=False),
    "tbq4_attention with offsets and exact tokens": tbq4_inputs,
    "tbq4_attention of many queries": with_options(tbq4_inputs, q_len=40),
    "tbq4_dequantize": code_inputs,
    "tbq4_dequantize of many rows": with_options(code_inputs, rows=7000),
    "tbq4_page_offsets_": page_offsets_inputs,
    "tbq4_quantize": codec_inputs,
    "tbq4_quantize of many rows": with_options(codec_inputs, rows=7000),
    "tbq4_rope_append_": rope_append_inputs,
    "tbq4_rotate": codec_inputs,
}


def call(op: str, inputs: Inputs) -> tuple[Tensor, ...]:
    """The op's outputs, and the tensors that it writes into."""
    overload = getattr(torch.ops.flashq, op.split()[0]).default
    out = overload(**inputs)
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    written = [a.name for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write]
    return (*outputs, *(inputs[name] for name in written if name in inputs))


def expected_of(op: str, seed: int) -> tuple[Tensor, ...]:
    """The result of a plain call, on the host."""
    return tuple(x.cpu() for x in call(op, INPUTS[op](seed, "cuda")))


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(got, expected, strict=True))


def capture(op: str, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    call(op, inputs)  # torch asks for a first call outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(op, inputs)
    return graph, results


@pytest.mark.contract(12)
@pytest.mark.parametrize("op", INPUTS)
def test_a_graph_replays_with_other_inputs(op: str) -> None:
    inputs = INPUTS[op](1, "cuda")
    graph, results = capture(op, inputs)
    for seed in (2, 3):
        for name, tensor in INPUTS[op](seed, "cuda").items():
            if isinstance(tensor, Tensor):
                inputs[name].copy_(tensor)
        graph.replay()
        assert same(results, expected_of(op, seed))


@pytest.mark.contract(12, 13)
@pytest.mark.parametrize("op", INPUTS)
def test_two_graphs_replay_at_the_same_time(op: str) -> None:
    inputs = [INPUTS[op](seed, "cuda") for seed in (1, 2)]
    graphs = [capture(op, each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)  # both queues fill meanwhile
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, results), seed in zip(graphs, (1, 2), strict=True):
        assert same(results, expected_of(op, seed))


@pytest.mark.contract(12)
@pytest.mark.parametrize("op", INPUTS)
def test_work_goes_to_the_current_stream_and_nobody_waits(op: str) -> None:
    """A call that waits for its stream returns after the kernel ahead of it, however long that one takes."""
    late, stream = INPUTS[op](2, "cuda"), torch.cuda.Stream()
    call(op, INPUTS[op](1, "cuda"))  # whatever is done only once
    returned_first = False
    for cycles in (200_000_000, 4_000_000_000):  # 0.1 s; 2 s for a host that other programs keep busy
        inputs = INPUTS[op](1, "cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            slept = stream.record_event()
            for name, tensor in late.items():
                if isinstance(tensor, Tensor):
                    inputs[name].copy_(tensor)
            results = call(op, inputs)
            returned_first = not slept.query()
        stream.synchronize()
        assert same(results, expected_of(op, 2))
        if returned_first:
            break
    assert returned_first, "the call waited for its stream"


HOST_US = {"tbq4_rope_append_": 21}  # it has twice the tensors of others; torch takes two thirds to pass them on


@pytest.mark.contract(12)
@pytest.mark.parametrize("op", [op for op in INPUTS if op.split()[0] not in ON_CUDA])
def test_a_call_keeps_the_host_for_12_us(op: str) -> None:
    """The fastest of many rounds, beside torch's add_: 6.6 us of an idle machine, more where the machine is busy."""
    inputs, x, calls = INPUTS[op](1, "cuda"), torch.zeros(1, device="cuda"), 20
    overload = getattr(torch.ops.flashq, op.split()[0]).default

    def time_calls(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls

    for _ in range(3):  # other processes may slow one down for a while
        with torch.inference_mode():
            rounds = [(time_calls(lambda: overload(**inputs)), time_calls(lambda: x.add_(1))) for _ in range(600)]
        taken, added = (min(times) for times in zip(*rounds, strict=True))
        limit = HOST_US.get(op, 12) * 1e-6 * max(1, added / 6.6e-6)
        if taken < limit:
            return
    pytest.fail(f"{taken * 1e6:.1f} us, add_ {added * 1e6:.1f} us")


@pytest.mark.contract(12)
@pytest.mark.parametrize("op", INPUTS)
def test_the_device_is_that_of_the_inputs(op: str) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU")
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            results = call(op, INPUTS[op](1, f"cuda:{other}"))
            assert torch.cuda.current_device() == current
        assert all(x.device.index == other for x in results)
        assert same(results, expected_of(op, 1))


# --- more than 2^31 elements, and caches of more than 2^32 values -----------------------------------------------------

ROWS = 2**21 + 3  # tokens of 8 heads of 128 values: 2^31 values and a few tokens
Large = tuple[Inputs, Inputs, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]
"""Large inputs, small ones, and what of the large ones' results has to equal the results of the small ones."""


def large_merge() -> Large:
    tail = 5
    outs = torch.empty(2, ROWS, 8, 128, dtype=torch.float16, device="cuda")
    outs[:, -tail:] = randn(2, tail, 8, 128, dtype=torch.float16).cuda()
    lses = torch.zeros(2, 8, ROWS, device="cuda")
    small = {"outs": outs[:, -tail:].clone(), "lses": lses[..., -tail:].clone()}
    return {"outs": outs, "lses": lses}, small, lambda results: (results[0][-tail:], results[1][:, -tail:])


def large_append() -> Large:
    """The last slots of a cache of 2^32 values and more. Keys and values are the same, and so are their caches."""
    pages = 2 * ROWS // 16 + 1
    cache = torch.empty(pages, 16, 8, 128, dtype=torch.float16, device="cuda")
    k = randn(3, 8, 128, dtype=torch.float16).cuda()
    slots = torch.tensor([15, 3, 8], device="cuda")
    last = torch.zeros_like(cache[-1:])
    small = {"k": k, "v": k, "k_cache": last, "v_cache": last, "slots": slots}
    cache[-1:] = 0
    large = small | {"k_cache": cache, "v_cache": cache, "slots": slots + (pages - 1) * 16}
    return large, small, lambda results: tuple(x[-1:] for x in results)


def large_prefill() -> Large:
    """Every query sees its own key alone, and so do those of the small call."""
    x = torch.zeros(1, ROWS, 8, 128, dtype=torch.float16, device="cuda")
    x[:, -5:] = randn(5, 8, 128, dtype=torch.float16).cuda()
    options = {"causal": True, "window_left": 0}
    large, small = (dict.fromkeys("qkv", y) | options for y in (x, x[:, -5:].clone()))
    return large, small, lambda results: (results[0][:, -5:], results[1][..., -5:])


def large_varlen(large_name: str) -> Large:
    """Few queries over many keys, or many over few: the last sequence of them lies past 2^31 elements."""
    room = torch.zeros(ROWS, 8, 128, dtype=torch.float16, device="cuda")
    few = randn(12, 8, 128, dtype=torch.float16).cuda()
    room[-5:] = few[-5:]
    ends, few_ends, last = (torch.tensor(x, device="cuda") for x in ([0, ROWS - 5, ROWS], [0, 7, 12], [0, 5]))
    if large_name == "k":
        large = {"q": few, "k": room, "v": room, "cu_seqlens_q": few_ends, "cu_seqlens_k": ends}
    else:
        large = {"q": room, "k": few, "v": few, "cu_seqlens_q": ends, "cu_seqlens_k": few_ends}
    small = dict.fromkeys("qkv", few[-5:]) | {"cu_seqlens_q": last, "cu_seqlens_k": last}
    return large, small, lambda results: (results[0][-5:], results[1][:, -5:])


def large_decode() -> Large:
    """Pages at both ends of a cache of 2^32 values and more; K and V are the same."""
    pages = torch.tensor([[2 * ROWS // 16, 3, 2 * ROWS // 16 - 1]], device="cuda")
    cache = torch.empty(2 * ROWS // 16 + 1, 16, 8, 128, dtype=torch.float16, device="cuda")
    few = randn(3, 16, 8, 128, dtype=torch.float16).cuda()
    cache[pages[0]] = few
    index = {"q": randn(1, 2, 8, 128, dtype=torch.float16).cuda(), "seqlens": torch.tensor([43], device="cuda")}
    large = index | {"k_cache": cache, "v_cache": cache, "block_table": pages}
    small = index | {"k_cache": few, "v_cache": few, "block_table": torch.arange(3, device="cuda")[None]}
    return large, small, lambda results: results


def large_dense_decode() -> Large:
    """The last keys of two sequences of 2^31 values and more."""
    cache = torch.empty(2, ROWS, 8, 128, dtype=torch.float16, device="cuda")
    skipped = ROWS - 2051
    few = randn(2, ROWS - skipped, 8, 128, dtype=torch.float16).cuda()
    cache[:, skipped:] = few
    index = {"q": randn(2, 2, 8, 128, dtype=torch.float16).cuda()}
    starts, lengths = (torch.tensor(x, device="cuda") for x in ([ROWS - 900, ROWS - 40], [ROWS, ROWS - 1]))
    large = index | {"k_cache": cache, "v_cache": cache, "seqlens": lengths, "kv_start": starts}
    small = index | {"k_cache": few, "v_cache": few, "seqlens": lengths - skipped, "kv_start": starts - skipped}
    return large, small, lambda results: results


def large_tbq4_attention() -> Large:
    """Pages at both ends of planes and offsets of 2^32 values and more; K and V are the same."""
    pages = torch.tensor([[2 * ROWS // 16, 3, 2 * ROWS // 16 - 1]], device="cuda")
    near = torch.ops.flashq.tbq4_quantize(randn(3, 8, 16, 128).cuda())
    near = {"codes": near[0], "norms": near[1], "offsets": randn(3, 8, 128, dtype=torch.float16).cuda()}
    far = {
        name: torch.empty(2 * ROWS // 16 + 1, *x.shape[1:], dtype=x.dtype, device="cuda") for name, x in near.items()
    }
    for name, x in near.items():
        far[name][pages[0]] = x
    index = {"q": randn(1, 2, 8, 128, dtype=torch.float16).cuda(), "seqlens": torch.tensor([43], device="cuda")}

    def arguments(planes: Inputs, table: Tensor) -> Inputs:
        both = {f"{kind}_{name}": planes[name] for kind in "kv" for name in ("codes", "norms")}
        return index | both | {"k_offsets": planes["offsets"], "block_table": table}

    return arguments(far, pages), arguments(near, torch.arange(3, device="cuda")[None]), lambda results: results


def large_codec() -> Large:
    x = torch.zeros(ROWS, 8, 128, dtype=torch.float16, device="cuda")
    x[-5:] = randn(5, 8, 128, dtype=torch.float16).cuda()
    return {"x": x}, {"x": x[-5:].clone()}, lambda results: tuple(out[-5:] for out in results)


def large_codes() -> Large:
    codes = torch.zeros(2 * ROWS, 8, 64, dtype=torch.uint8, device="cuda")
    norms = torch.zeros(2 * ROWS, 8, 1, dtype=torch.float16, device="cuda")
    last = code_inputs(0, "cuda")
    codes[-5:, :3], norms[-5:, :3] = last["codes"][:5], last["norms"][:5]
    small = {"codes": codes[-5:].clone(), "norms": norms[-5:].clone()}
    return {"codes": codes, "norms": norms}, small, lambda results: (results[0][-5:],)


def large_tbq4_append() -> Large:
    """The last page of planes of 2^32 values and more. K and V get the same planes, as in large_append."""
    pages = 2 * ROWS // 16 + 1
    codes = torch.zeros(pages, 8, 16, 64, dtype=torch.uint8, device="cuda")
    norms = torch.zeros(pages, 8, 16, 1, dtype=torch.float16, device="cuda")
    k = randn(3, 8, 128, dtype=torch.float16).cuda()
    slots = torch.tensor([15, 3, 8], device="cuda")
    last = {"k_codes": codes[-1:].clone(), "k_norms": norms[-1:].clone()}
    last |= {"v_codes": last["k_codes"], "v_norms": last["k_norms"]}
    small = {"k": k, "v": k, "slots": slots} | last
    large = small | {"slots": slots + (pages - 1) * 16}
    large |= {f"{name}_codes": codes for name in "kv"} | {f"{name}_norms": norms for name in "kv"}
    return large, small, lambda results: tuple(x[-1:] for x in results)


def large_rope_append() -> Large:
    """As large_tbq4_append, of the last tokens of 2^31 values and more. All others are skipped."""
    large, small, _ = large_tbq4_append()
    rows = torch.zeros(ROWS, 8, 128, dtype=torch.float16, device="cuda")
    rows[-3:] = small["k"]
    pool = torch.zeros(2 * ROWS // 16 + 1, 16, 8, 128, dtype=torch.float16, device="cuda")
    slots = torch.full((ROWS,), -1, device="cuda")
    tables = {name: randn(9, 64, seed=i).cuda() for i, name in enumerate(("cos", "sin"))}
    positions = torch.arange(ROWS, device="cuda") % 9
    small |= tables | {"q": small["k"], "positions": positions[-3:], "exact_slots": small["slots"]}
    small |= {name: torch.zeros_like(pool[-1:]) for name in ("exact_k", "exact_v")}
    large |= tables | dict.fromkeys("qkv", rows) | {"positions": positions, "exact_k": pool, "exact_v": pool.clone()}
    large |= {name: large[f"k{name[1:]}"].clone() for name in ("v_codes", "v_norms")}  # keys turn, and values do not
    small |= {name: small[f"k{name[1:]}"].clone() for name in ("v_codes", "v_norms")}
    for name in ("slots", "exact_slots"):
        large[name] = slots.clone()
        large[name][-3:] = small["slots"] + (len(pool) - 1) * 16
    return large, small, lambda results: (results[0][-3:], *(x[-1:] for x in results[1:]))


def large_page_offsets() -> Large:
    """The last page is opened, the one before it decoded."""
    pages = 2 * ROWS // 16 + 1
    codes, norms = torch.ops.flashq.tbq4_quantize(randn(2, 8, 16, 128).cuda())
    k, offsets = randn(1, 8, 128, dtype=torch.float16).cuda(), randn(2, 8, 128, dtype=torch.float16).cuda()
    index = {"seqlens": torch.tensor([17], device="cuda"), "cu_seqlens": torch.tensor([0, 1], device="cuda")}
    table = torch.tensor([[0, 1]], device="cuda")
    small = {"k": k, "k_codes": codes, "k_norms": norms, "k_offsets": offsets, "block_table": table} | index
    large = small | {"block_table": table + pages - 2}
    for name in ("k_codes", "k_norms", "k_offsets"):
        large[name] = torch.zeros(pages, *small[name].shape[1:], dtype=small[name].dtype, device="cuda")
        large[name][-2:] = small[name]
    return large, small, lambda results: (results[0][-2:],)


LARGE: dict[str, Callable[[], Large]] = {
    "decode": large_decode,
    "decode without a table": large_dense_decode,
    "kv_append_": large_append,
    "merge_states": large_merge,
    "prefill": large_prefill,
    "prefill_varlen of many keys": lambda: large_varlen("k"),
    "prefill_varlen of many queries": lambda: large_varlen("q"),
    "tbq4_append_": large_tbq4_append,
    "tbq4_attention": large_tbq4_attention,
    "tbq4_dequantize": large_codes,
    "tbq4_page_offsets_": large_page_offsets,
    "tbq4_quantize": large_codec,
    "tbq4_rope_append_": large_rope_append,
    "tbq4_rotate": large_codec,
}


@pytest.mark.contract(11)
@pytest.mark.parametrize("op", LARGE)
def test_offsets_beyond_32_bits(op: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of free GPU memory")
    large, small, tail = LARGE[op]()
    got, expected = tail(call(op, large)), call(op, small)
    if op.split()[0] in ON_CUDA:  # keys may fall into other tiles and splits
        assert all(torch.allclose(x, y, rtol=0, atol=4e-3) for x, y in zip(got, expected, strict=True))
    else:
        assert same(got, expected)
