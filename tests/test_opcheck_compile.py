"""The ops under PyTorch's tracing: opcheck, torch.compile and torch.export of a module that serves a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import encode_pages, page_out, randn
from torch import Tensor, nn

import flashq
from flashq import _register, reference


def samples(op: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A plain call and one with every option."""
    cache = page_out([randn(40, 2, 64), randn(7, 2, 64)], [randn(40, 2, 64, seed=1), randn(7, 2, 64, seed=2)], 16)
    cache = cache._replace(k=cache.k.nan_to_num(), v=cache.v.nan_to_num())  # opcheck compares with torch.allclose
    planes = encode_pages(cache)
    q, dense = randn(2, 3, 4, 64, seed=3), randn(2, 9, 2, 64, seed=4)
    sinks, cu, start = randn(4), torch.tensor([0, 2, 6]), torch.tensor([3, 0])
    mask = {"scale": 0.2, "causal": True, "window_left": 5, "softcap": 9.0}
    table, lengths = cache.block_table, cache.seqlens
    pool = (cache.k, cache.v, cache.block_table)
    offsets = randn(len(cache.k), 2, 64, dtype=torch.float16)
    slots = torch.tensor([3, -1, 17])
    new, tables = randn(3, 2, 64, seed=5), randn(2, 20, 24, seed=6)
    return {
        "prefill": [((q, dense, dense), {}), ((q, dense, dense, sinks), mask | {"window_right": 1})],
        "prefill_varlen": [
            ((q.flatten(0, 1), dense.flatten(0, 1), dense.flatten(0, 1), cu, 3 * cu), {}),
            (
                (q.flatten(0, 1), dense.flatten(0, 1), dense.flatten(0, 1), cu, 3 * cu, sinks),
                {"max_seqlen_q": 4} | mask,
            ),
        ],
        "decode": [
            ((q, cache.k, cache.v, lengths, table), {}),
            (
                (q.flatten(0, 1), cache.k, cache.v, lengths, table, cu, start, sinks),
                mask | {"kv_chunk": 256, "out_dtype": torch.float32},
            ),
        ],
        "tbq4_attention": [
            ((q, *planes.args()), {}),
            (
                (q.flatten(0, 1), *planes.args(), cu, start, sinks, offsets, *pool),
                mask | {"exact_first": 2, "exact_last": 9, "kv_chunk": 256, "out_dtype": torch.float32},
            ),
        ],
        "kv_append_": [((new, new, cache.k, cache.v, slots), {})],
        "tbq4_append_": [((new, new, *planes[:4], slots), {}), ((new, new, *planes[:4], slots, offsets), {})],
        "tbq4_rope_append_": [
            ((q[0], new, new, *tables, slots.clamp(min=0), *planes[:4], slots), {}),
            (
                (q[0], new, new, *tables, slots.clamp(min=0), *planes[:4], slots, offsets, *pool[:2], slots),
                {"interleaved": True},
            ),
        ],
        "tbq4_page_offsets_": [
            ((new, *planes[:2], offsets, lengths, table, torch.tensor([0, 1, 3])), {}),
            (
                (new, *planes[:2], offsets, lengths, table, torch.tensor([0, 1, 3]), start, cache.k, table),
                {},
            ),
        ],
        "tbq4_quantize": [((q,), {}), ((q.half().transpose(0, 1),), {})],
        "tbq4_dequantize": [
            (reference.tbq4_quantize(q), {}),
            (reference.tbq4_quantize(q), {"dtype": torch.bfloat16}),
        ],
        "tbq4_rotate": [((q,), {}), ((q.bfloat16(),), {"inverse": True})],
        "merge_states": [
            ((randn(3, 2, 5, 4, 64), randn(3, 2, 4, 5)), {}),
            ((randn(3, 5, 4, 64, dtype=torch.float16), randn(3, 4, 5)), {}),
        ],
    }[op]


@pytest.mark.parametrize("op", _register.OPS)
def test_opcheck(op: str) -> None:
    for args, kwargs in samples(op):
        torch.library.opcheck(getattr(torch.ops.flashq, op).default, args, kwargs)


@pytest.mark.parametrize("op", _register.OPS)
def test_fake_rules_tell_shapes_dtypes_and_strides(op: str) -> None:
    for args, kwargs in samples(op):
        function = getattr(flashq, op)
        results = function(*args, **kwargs)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = function(*[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args], **kwargs)
        if results is None:
            assert fakes is None
            continue
        pairs = zip(results, fakes, strict=True) if isinstance(results, tuple) else [(results, fakes)]
        for real, fake in pairs:
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


class Server(nn.Module):
    """A layer's work for a prompt and for each token after it, on a 16-bit and on a TBQ4 cache."""

    def prompt(
        self, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], planes: list[Tensor], slots: Tensor
    ) -> Tensor:
        flashq.kv_append_(k[0], v[0], caches[0], caches[1], slots)
        flashq.tbq4_append_(k[0], v[0], planes[0], planes[1], planes[2], planes[3], slots)
        return flashq.prefill(q, k, v, causal=True)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], planes: list[Tensor], slots: Tensor,
        seqlens: Tensor, table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        prompt = self.prompt(q * 2, k, v, caches, planes, slots)
        out, lse = flashq.decode(q, caches[0], caches[1], seqlens, table)
        coded, coded_lse = flashq.tbq4_attention(q, planes[0], planes[1], planes[2], planes[3], seqlens, table)
        merged, _ = flashq.merge_states(torch.stack([out, coded]), torch.stack([lse, coded_lse]))
        return prompt + 1, merged, flashq.tbq4_dequantize(*flashq.tbq4_quantize(flashq.tbq4_rotate(out)))


def step(tokens: int, length: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of Server.forward: `tokens` new tokens that end at `length`."""
    q, k, v = (randn(1, tokens, h, 64, seed=seed + h) for h in (4, 2, 3))
    caches = [torch.zeros(6, 16, 2, 64) for _ in range(2)]
    planes = [torch.zeros(6, 2, 16, 32, dtype=torch.uint8), torch.zeros(6, 2, 16, 1).half()]
    planes += [p.clone() for p in planes]
    table = torch.tensor([[4, 0, 2, 5]])
    position = torch.arange(length - tokens, length)
    slots = table[0, position // 16] * 16 + position % 16
    return q, k, v[:, :, :2], caches, planes, slots, torch.tensor([length]), table


def assert_same_run(function: Any, arguments: tuple[Any, ...], eager_arguments: tuple[Any, ...]) -> None:
    """Same outputs, and the same writes into the caches, as eager mode."""
    got, truth = function(*arguments), Server()(*eager_arguments)
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip([*arguments[3], *arguments[4]], [*eager_arguments[3], *eager_arguments[4]], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert a.any()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_breaks_and_without_recompiling(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Server(), fullgraph=True, dynamic=True, backend=backend)
    with torch.inference_mode(False), torch.no_grad():
        assert_same_run(compiled, step(5, 9), step(5, 9))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens, length in ((6, 20), (3, 40), (17, 64), (4, 33)):
                assert_same_run(compiled, step(tokens, length, seed=length), step(tokens, length, seed=length))


def test_export() -> None:
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = {name: {1: tokens} for name in ("q", "k", "v")}
    shapes |= {"caches": [None] * 2, "planes": [None] * 4, "slots": {0: tokens}, "seqlens": None, "table": None}
    with torch.no_grad():
        program = torch.export.export(Server(), step(5, 9), dynamic_shapes=shapes)
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert {f"flashq.{op}.default" for op in ("prefill", "kv_append_", "tbq4_append_", "decode")} <= targets
        for count, length in ((5, 9), (3, 40), (17, 64)):
            assert_same_run(program.module(), step(count, length), step(count, length))


@pytest.mark.contract(15)
def test_compiled_code_refuses_gradients() -> None:
    q = randn(1, 3, 4, 64).requires_grad_()
    k = randn(1, 9, 2, 64)
    compiled = torch.compile(lambda q: flashq.prefill(q, k, k)[0], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="requires grad"):
        compiled(q).sum().backward()


def test_fakes_refuse_what_has_no_shape() -> None:
    q, k = torch.empty(3, 4, 64, device="meta"), torch.empty(3, 9, 2, 64, device="meta")
    with pytest.raises(RuntimeError, match=r"flashq::prefill: q: expected 4 dimensions \(B, Sq, Hq, D\), got shape"):
        flashq.prefill(q, k, k)
    with pytest.raises(RuntimeError, match="flashq::tbq4_quantize: x: expected head_dim 64, 128 or 256, got 80"):
        flashq.tbq4_quantize(torch.empty(2, 80, device="meta"))
