"""The launch layer: GPUs that are refused, and overrides for tests of smaller GPUs."""

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
