"""What needs a process of its own: peak memory, and FLASHQ_CHECK, which is read when the library loads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str, **environment: str) -> str:
    """Runs Python code, returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY = """
    import resource, torch, flashq
    torch.set_num_threads(2)

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    tokens, heads, dim = 65536, 2, 128
    def grows(call, first):
        first()  # loads code, starts threads
        before = peak_mib()
        call()
        return peak_mib() - before
"""


@pytest.mark.contract(17)
def test_no_decoded_copy_of_the_cache_exists() -> None:
    """65,536 tokens: decoded keys alone would be 32 MiB in 16 bits; the call may take 8 MiB for all it does."""
    out = run(
        MEMORY
        + """
    codes = torch.full((tokens // 64, heads, 64, dim // 2), 7, dtype=torch.uint8)
    norms = torch.ones(tokens // 64, heads, 64, 1, dtype=torch.float16)
    table, q = torch.arange(tokens // 64)[None], torch.randn(1, 1, 8, dim).bfloat16()
    def attend(length):
        flashq.tbq4_attention(q, codes, norms, codes, norms, torch.tensor([length]), table)
    print(grows(lambda: attend(tokens), lambda: attend(300)))
    """
    )
    assert float(out) < 8


@pytest.mark.contract(2)
def test_no_hidden_copy_of_strided_inputs() -> None:
    """Heads-first views of 64 MiB of keys and values each: a contiguous copy of one would show."""
    out = run(
        MEMORY
        + """
    k = torch.ones(1, heads, tokens, dim * 2)[..., :dim].transpose(1, 2)
    q = torch.randn(1, 2, 8, dim)
    print(grows(lambda: flashq.prefill(q, k, k), lambda: flashq.prefill(q, k[:, :300], k[:, :300])))
    lengths = torch.tensor([tokens])
    print(grows(lambda: flashq.decode(q, k, k, lengths), lambda: flashq.decode(q, k, k, lengths * 0 + 300)))
    """
    )
    assert all(float(line) < 8 for line in out.split())


@pytest.mark.contract(9)
def test_check_mode_refuses_nan_and_inf() -> None:
    code = """
        import torch, flashq
        x = torch.zeros(3, 2, 64)
        planes = [torch.zeros(1, 2, 4, 32, dtype=torch.uint8), torch.zeros(1, 2, 4, 1, dtype=torch.float16)] * 2
        table, at = torch.ones(3, 32), torch.arange(3)
        for bad in (float("nan"), float("inf")):
            wrong = x.clone()
            wrong[1, 1, 5] = bad
            wrong_table = table * bad
            for call in (lambda: flashq.tbq4_quantize(wrong),
                         lambda: flashq.tbq4_append_(wrong, x, *planes, torch.arange(3)),
                         lambda: flashq.tbq4_append_(x, wrong, *planes, torch.arange(3)),
                         lambda: flashq.tbq4_rope_append_(x, wrong, x, table, table, at, *planes, at),
                         lambda: flashq.tbq4_rope_append_(x, x, x, wrong_table, table, at, *planes, at),
                         lambda: flashq.tbq4_rope_append_(x, x, wrong, table, table, at, *planes, at)):
                try:
                    call()
                    print("accepted")
                except RuntimeError as error:
                    print(error)
        flashq.tbq4_quantize(x)
        flashq.tbq4_append_(x, x, *planes, torch.arange(3))
        flashq.tbq4_rope_append_(wrong, x, x, table, table, at, *planes, at)  # no query is quantized
    """
    lines = run(code, FLASHQ_CHECK="1").splitlines()
    starts = ["flashq::tbq4_quantize: x", "flashq::tbq4_append_: k", "flashq::tbq4_append_: v"]
    starts = 2 * [*starts, *(f"flashq::tbq4_rope_append_: {name}" for name in ("k", "cos", "v"))]
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line
        assert "expected finite" in line
    assert run(code, FLASHQ_CHECK="0").splitlines() == ["accepted"] * 12


@pytest.mark.contract(16)
def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    code = """
        import torch, flashq
        try:
            flashq.prefill(*[torch.zeros(1, 1, 1, 64)] * 3)
        except RuntimeError as error:
            print(error)
    """
    assert "FLASHQ_CPU_ISA: expected one of portable" in run(code, FLASHQ_CPU_ISA="mmx")
    assert run(code, FLASHQ_CPU_ISA="portable") == ""
