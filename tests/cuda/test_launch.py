"""The launch layer: GPUs that are refused, overrides for tests of smaller GPUs, and what FLASHQ_CHECK=1 finds."""

from __future__ import annotations

import ctypes

import pytest
from test_process import run

import flashq

needs_library = pytest.mark.skipif(flashq.libraries.cuda_problem is not None, reason="no CUDA library")


def message_of(function: str, *arguments: int | bytes | None) -> str:
    """What a check of the CUDA library says; it needs no GPU."""
    library = ctypes.CDLL(str(flashq.libraries.folder / "libflashq_cuda.so"))
    text = ctypes.create_string_buffer(480)
    getattr(library, function)(*arguments, text, len(text))
    return text.value.decode()


@needs_library
@pytest.mark.contract(16)
def test_capabilities() -> None:
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 1)):
        assert message_of("flashq_cuda_check_capability", *capability) == ""
    for major, minor in ((7, 5), (7, 0), (3, 5)):
        message = message_of("flashq_cuda_check_capability", major, minor)
        assert message == f"device: expected an NVIDIA GPU of compute capability 8.0 or newer, got {major}.{minor}"


@needs_library
def test_overrides() -> None:
    for arch, shared in ((None, None), (b"80", None), (None, b"1"), (b"80", b"101376"), (b"", b"")):
        assert message_of("flashq_cuda_check_overrides", arch, shared) == ""
    for arch in (b"90", b"8.0", b"sm_80", b"0", b" 80", b"80 "):
        message = message_of("flashq_cuda_check_overrides", arch, None)
        assert message == f"FLASHQ_CUDA_ARCH: expected 80 or nothing, got {arch.decode()}"
    for shared in (b"0", b"-1", b"48k", b"1e5", b"99999999999999999999", b" 1", b"1 "):
        message = message_of("flashq_cuda_check_overrides", None, shared)
        assert message == f"FLASHQ_CUDA_SMEM: expected a number of bytes from 1 on, or nothing, got {shared.decode()}"


@pytest.mark.cuda
@pytest.mark.parametrize("variable", ["FLASHQ_CUDA_ARCH", "FLASHQ_CUDA_SMEM"])
def test_a_bad_override_is_an_error_of_every_op(variable: str) -> None:
    code = """
        import torch, flashq
        x, slots = torch.zeros(1, 1, 1, 64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        for call in (lambda: flashq.merge_states(x, x[..., 0]), lambda: flashq.kv_append_(x[0], x[0], x, x, slots)):
            for _ in range(2):
                try:
                    print(call())
                except RuntimeError as error:
                    print(error)
    """
    lines = run(code, **{variable: "seventy"}).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [op, variable] for op in ("flashq::merge_states", "flashq::kv_append_") for _ in range(2)
    ]
    assert all(line.endswith(", got seventy") for line in lines)


@pytest.mark.cuda
def test_overrides_lower_what_configurations_are_chosen_by() -> None:
    pytest.importorskip("flashq._C", reason="flashq._C was built for another Python", exc_type=ImportError)
    code = """
        import flashq._C
        gpu = flashq._C.gpus()[0]
        print(gpu["capability"], gpu["shared_bytes"], gpu["kernel_arch"], gpu["kernel_shared_bytes"])
    """
    plain = run(code, FLASHQ_CUDA_ARCH="", FLASHQ_CUDA_SMEM="").split(") ")
    shared = plain[1].split()[0]
    assert plain[1].split()[2] == shared
    lowered = run(code, FLASHQ_CUDA_ARCH="80", FLASHQ_CUDA_SMEM="65536").split(") ")
    assert lowered == [plain[0], f"{shared} 80 65536\n"]
    assert run(code, FLASHQ_CUDA_ARCH="", FLASHQ_CUDA_SMEM=str(2**40)).split(") ") == plain


CHECK = """
    import torch, flashq
    k, cache = torch.ones(3, 1, 64, device="cuda"), torch.zeros(2, 4, 1, 64, device="cuda")

    def attempt(slots=(0, 1, 2)):
        try:
            flashq.kv_append_(k, k, cache, cache, torch.tensor(slots, device="cuda"))
        except RuntimeError as error:
            print(error)
"""


@pytest.mark.cuda
@pytest.mark.contract(9)
def test_check_mode_raises_at_the_next_call() -> None:
    code = (
        CHECK
        + """
    attempt((0, 8, 1))
    print("next")
    attempt()
    attempt()
    attempt((0, -1, 2**40))
    try:
        flashq.merge_states(torch.zeros(1, 1, 1, 8, device="cuda"), torch.zeros(1, 1, 1, device="cuda"))
    except RuntimeError as error:
        print(error)
    attempt()
    print(int(cache.sum()))
    """
    )
    first, second, third, total = run(code, FLASHQ_CHECK="1").splitlines()
    expected = "of an earlier kv_append_: expected a slot below the cache's 8 (or negative: skip), got"
    assert first == "next"
    assert second == f"flashq::kv_append_: slots[1] {expected} 8"
    assert third == f"flashq::merge_states: slots[2] {expected} {2**40}"
    assert int(total) == 64 * 3
    assert run(code, FLASHQ_CHECK="0").splitlines() == ["next", str(64 * 3)]


@pytest.mark.cuda
@pytest.mark.contract(9, 12)
def test_check_mode_and_graphs() -> None:
    """Neither a capture nor a replay raises; the call after a replay does."""
    code = (
        CHECK
        + """
    slots = torch.tensor([0, 1, 2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    attempt((0, 1, 99))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flashq.kv_append_(k, k, cache, cache, slots)
    print("captured")
    attempt()
    slots.fill_(77)
    graph.replay()
    attempt()
    attempt()
    """
    )
    captured, first, second = run(code, FLASHQ_CHECK="1").splitlines()
    assert captured == "captured"
    assert first.endswith("got 99")
    assert second.endswith("got 77")


@pytest.mark.cuda
def test_check_mode_may_begin_with_a_capture() -> None:
    code = (
        CHECK
        + """
    slots = torch.tensor([0, 1, 50], device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flashq.kv_append_(k, k, cache, cache, slots)
    graph.replay()
    attempt()
    print(int(cache.sum()))
    """
    )
    raised, total = run(code, FLASHQ_CHECK="1").splitlines()
    assert raised.endswith("got 50")
    assert int(total) == 64 * 2
