"""The GPU frame: what needs no GPU, and a small run where there is one."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import (
    decode,
    empty_op,
    gpu_ceilings,
    gpu_graphs,
    gpu_peers,
    gpu_probes,
    prefill,
    report,
    small_ops,
    tbq4_decode,
)
from benchmarks.__main__ import main, measure_all
from benchmarks.environment import SMI_FIELDS, parse_smi
from benchmarks.measure import Case, Result, summarize
from flashq import reference
from flashq.cli import machine

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00", "flashq": "0.1.0", "commit": "abc", "dirty": False, "torch": "2.11",
    "python": "3.12", "compiler": "g++", "cpu": "some CPU", "cores": 16, "threads": 8, "cpu_level": "avx2",
    "load_average": 0.5, "command": "python -m benchmarks cuda", "gpu": "NVIDIA X1", "compute_capability": "9.0",
    "sms": 132, "l2_bytes": 50 << 20, "gpu_bytes": 1 << 37, "cuda": "13.0", "cuda_archs": "9.0a",
    "driver": "580.1", "sm_clock": 1700.0, "max_sm_clock": 1980.0, "memory_clock": 3201.0, "power_limit": None,
    "temperature": 40.0, "read_rate": 4.5e12, "copy_rate": 4.2e12, "matmul_rate": 7.6e14, "mode": "hot", "pause": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("footprint", [1.0, 3e5, 2.1e7, 2e8, 2.5e8, 1e9])
def test_a_rotation_is_larger_than_four_caches_and_no_longer_than_needed(footprint: float) -> None:
    l2_bytes = 50 << 20
    sets = gpu_graphs.rotation(footprint, l2_bytes)
    assert sets * footprint > 4 * l2_bytes
    assert sets == 1 or (sets - 1) * footprint <= 4 * l2_bytes


def test_a_call_without_memory_needs_no_rotation() -> None:
    assert gpu_graphs.rotation(0.0, 50 << 20) == 1


@pytest.mark.parametrize(("held", "sets"), [(0, 10**9), (1 << 20, 8192), (20_000_000, 429), (5 << 30, 1), (9 << 30, 1)])
def test_sets_that_hold_more_than_a_call_touches_are_fewer(held: int, sets: int) -> None:
    assert min(gpu_graphs.most_sets(held, 8 << 30), 10**9) == sets


def test_the_sets_of_a_row_leave_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 10 << 30  # by others

    def make(index: int) -> int:
        nonlocal held
        held += 20_000_000
        return index

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=30 << 30))
    monkeypatch.setattr(gpu_graphs, "l2_bytes", lambda: 60 << 20)
    assert gpu_graphs.make_sets(make, 1e7) == list(range(gpu_graphs.rotation(1e7, 60 << 20)))
    held = 10 << 30
    assert len(gpu_graphs.make_sets(make, 1536.0)) == (10 << 30) // 20_000_000
    assert held <= 20 << 30


def test_summary_of_a_row() -> None:
    case: Case[None] = Case("merge", "row", "TFLOP/s", lambda: None)
    result = summarize(case, 2e12, {"flashq": [1.0, 3.0, 2.0], "peer": [4.0, 6.0, 2.0]}, [4e12, 2e12, 3e12])
    assert result.rate == pytest.approx(1.0)
    assert result.ceiling == pytest.approx(3.0)
    assert result.share == pytest.approx(1 / 3)
    assert result.ratios == {"peer": pytest.approx(2.0)}  # rounds: 4, 2, 1
    assert Result.from_json(result.to_json()) == result


def test_a_row_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def measure_row(case: Case[None]) -> Result:
        if case.name == "bad":
            raise RuntimeError("no memory\nat all")
        return summarize(case, 1.0, {"flashq": [1.0]}, [])

    cases = [Case("suite", name, "GB/s", lambda: None) for name in ("bad", "good")]
    results, failed = measure_all(cases, measure_row, Console(width=200))
    assert [result.name for result in results] == ["good"]
    assert failed == 1
    assert "bad: failed: no memory" in capsys.readouterr().out


def test_nvidia_smi_may_withhold_values() -> None:
    assert list(parse_smi("580.159.03, 1980, 1980, 3201, [N/A], 41\n").values()) == [
        "580.159.03", 1980.0, 1980.0, 3201.0, None, 41.0,
    ]  # fmt: skip
    assert parse_smi("") == dict.fromkeys(SMI_FIELDS.values())


def test_report_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case: Case[None] = Case("merge", "row", "GB/s", lambda: None)
    result = summarize(case, 2e6, {"flashq": [1e-6], "eager": [4e-6]}, [4e12])
    result.alone, result.host = 5e-6, {"flashq": 7e-6, "eager": 9e-6}
    stem = report.file_stem(ENVIRONMENT, "cuda")
    assert stem == "cuda-nvidia-x1-hot"
    assert report.file_stem(ENVIRONMENT, "cuda", "Some rows") == f"{stem}-some-rows"
    written = report.write_all(tmp_path, stem, ENVIRONMENT, [result], plot=False)
    assert [path.name for path in written] == [f"{stem}.{ending}" for ending in ("json", "md", "csv")]
    text = written[1].read_text()
    for part in ("NVIDIA X1", "132 SMs", "power limit unknown", "driver 580.1", "read 4.50 TB/s", "(abc)"):
        assert part in text
    header, _, row = text.strip().splitlines()[-3:]
    assert header == "| merge | median | GB/s | % of copy | x eager | one call alone | host | host of eager |"
    assert row == "| row | 1 µs | 2e+03 | 50% | 4.00 | 5 µs | 7 µs | 9 µs |"
    assert main(["compare", str(written[0]), str(written[0])]) == 0
    assert "within noise" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["cpu", "cuda"])
@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "soon"])
def test_seconds_are_positive(command: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--seconds", seconds])
    assert f"--seconds: expected a positive number of seconds, got '{seconds}'" in capsys.readouterr().err


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuda", "--only", "no such row"]) == 2
    assert "--only" in capsys.readouterr().out


def test_missing_gpu_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    assert main(["cuda", "--quick"]) == 2
    assert "cuda: expected an NVIDIA GPU that flashq can use: torch finds none" in capsys.readouterr().out
    monkeypatch.setattr(machine, "find_gpu", lambda: machine.Gpu("X", (9, 0), "no library"))
    assert main(["cuda", "--quick"]) == 2
    assert "no library" in capsys.readouterr().out


def test_rows_are_unique_and_cover_the_small_ops() -> None:
    names = [case.name for case in small_ops.cases()]
    assert len(names) == len(set(names))
    for op in ("tbq4_quantize", "tbq4_dequantize", "tbq4_rotate", "tbq4_append_", "kv_append_", "merge_states"):
        for dtype in ("fp32", "bf16", "fp16"):
            assert any(name.startswith(f"{op} {dtype} ") for name in names), (op, dtype)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("rows", [decode, tbq4_decode])
def test_rows_of_attention_are_unique(rows: ModuleType, quick: bool) -> None:
    names = [case.name for case in rows.cases(quick)]
    assert len(names) == len(set(names)) > 10


def test_rows_of_prefill_are_unique_and_the_same_in_both_dtypes() -> None:
    names = [case.name for case in prefill.cases()]
    assert len(names) == len(set(names))
    assert {name.replace("bf16", "fp16") for name in names} == {name for name in names if "fp16" in name}


def test_the_peer_without_fp16_gets_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.ones(2, dtype=torch.float16)

    def contender(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        ((name, call),) = gpu_peers.fa3_calls([x], lambda module, x: module.attend(x)).items()
        return name, call()

    monkeypatch.setattr(gpu_peers, "fa3", lambda: SimpleNamespace(attend=lambda x: x))
    name, got = contender(q)
    assert (name, got.dtype) == ("FlashAttention-3 in bf16", torch.bfloat16)
    assert contender(q.bfloat16())[0] == "FlashAttention-3"
    monkeypatch.setattr(gpu_peers, "fa3", lambda: None)
    assert gpu_peers.fa3_calls([q], lambda module, x: x) == {}


def test_operations_count_visible_pairs() -> None:
    shape = prefill.Shape(3, 2, 1, 7, 64)
    for options in ({}, {"window_left": 2}, {"causal": False}):
        visible = reference.visible_keys(5, 7, **({"causal": True} | options))
        assert prefill.work_of(shape, 5, 7, **options) == 4 * 64 * 2 * int(visible.sum())
    assert shape.work == 3 * 4 * 64 * 2 * 28


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_probes_compile(tmp_path: Path) -> None:
    command = [gpu_probes.find_nvcc(), *gpu_probes.FLAGS, "-arch=sm_80", "-Werror", "all-warnings"]
    subprocess.run([*command, str(gpu_probes.SOURCE), "-o", str(tmp_path / "probes.so")], check=True)


def test_missing_nvcc_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probes.shutil, "which", lambda name, path=None: None)
    with pytest.raises(RuntimeError, match="need nvcc"):
        gpu_probes.find_nvcc()


@pytest.mark.cuda
def test_ceilings_are_plausible() -> None:
    rates = gpu_ceilings.Ceilings(stream_bytes=1 << 28, matmul_size=2048).rates()
    assert 1e11 < rates["copy_rate"] < 1e14
    assert 1e11 < rates["read_rate"] < 1e14
    assert 1e12 < rates["matmul_rate"] < 1e17


@pytest.mark.cuda
def test_a_graph_rotates_its_inputs_and_is_timed_by_call() -> None:
    sets = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    graph = gpu_graphs.capture([lambda x=x: x.add_(1) for x in sets], least_seconds=1e-3)
    assert graph.calls % 3 == 0
    before = [x[0].item() for x in sets]
    taken = gpu_graphs.time_in_turns({"add": graph}, seconds=0.01)["add"]
    after = [x[0].item() for x in sets]
    assert len(taken) >= gpu_graphs.MIN_ROUNDS
    assert all(1e-7 < value < 1e-3 for value in taken)
    assert after[0] > before[0]
    assert len({y - x for x, y in zip(before, after, strict=True)}) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [[], ["--cool"]], ids=["hot", "cool"])
def test_quick_run(mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "^merge_states bf16 8" if mode else "^empty kernel|^merge_states bf16 8|^kv_append_ bf16 .*D128"  # pauses
    assert main(["cuda", "--quick", "--seconds", "0.01", "--only", only, "--out", str(tmp_path), *mode]) == 0
    (path,) = tmp_path.glob("*.json")
    assert re.search("-cool$" if mode else "-hot$", path.stem)
    document = json.loads(path.read_text())
    assert document["environment"]["mode"] == ("cool" if mode else "hot")
    assert document["environment"]["sms"] > 0
    rows = {row["name"].split()[0]: row for row in document["rows"]}
    assert set(rows) == ({"merge_states"} if mode else {"empty", "kv_append_", "merge_states"})
    assert set(rows["merge_states"]["ratios"]) == {"eager", small_ops.COPY}
    assert rows["merge_states"]["ceiling"] > 0
    for row in rows.values():
        assert all(spread["rounds"] >= gpu_graphs.MIN_ROUNDS for spread in row["seconds"].values())
        assert 0 < row["alone"] < 1
        assert all(0 < value < math.inf for value in row["host"].values())
        assert list(row["host"]) == ([] if row["name"] == "empty kernel" else list(row["seconds"]))
    assert "host" in capsys.readouterr().out


@pytest.mark.cuda
def test_quick_run_of_decode(tmp_path: Path) -> None:
    only = "^decode 1 x 64 heads 32/8|16 queries|window|pages of 16"
    assert main(["decode", "--quick", "--seconds", "0.01", "--only", only, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("decode-*.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) == 4
    assert all(row["ceiling"] > 0 for row in rows.values())
    first = rows["decode 1 x 64 heads 32/8 D128"]
    assert {"torch flash", "cuDNN"} <= set(first["ratios"])
    assert 0 < first["host"][empty_op.NAME] < first["host"]["flashq"]
    assert f"host of {empty_op.NAME}" in path.with_suffix(".md").read_text()


def test_the_empty_op_has_the_schema_of_decode() -> None:
    q = torch.ones(2, 1, 4, 8)
    out, lse = empty_op.decode()(q, q, q, q, kv_chunk=256, scale=0.5, out_dtype=torch.float32)
    assert out.data_ptr() == lse.data_ptr() == q.data_ptr()
    schemas = (str(op.decode.default._schema) for op in (torch.ops.flashq, torch.ops.flashq_empty))
    assert len({schema.split("::", 1)[1] for schema in schemas}) == 1


@pytest.mark.cuda
def test_quick_run_of_tbq4(tmp_path: Path) -> None:
    only = "1024 D256 offsets|heads 9/3|D128 ragged$"
    assert main(["tbq4", "--quick", "--seconds", "0.01", "--only", only, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("tbq4-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert sorted(row["suite"] for row in rows) == ["tbq4"] * 3 + ["tbq4 continuation"]
    assert all("flashq decode bf16" in row["ratios"] for row in rows)


@pytest.mark.cuda
def test_quick_run_of_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "^prefill bf16 2 x|^softcap fp16 .*D128|^window.*bf16|^packed bf16|fp16.*over 2048.*D256"
    assert main(["prefill", "--quick", "--seconds", "0.01", "--only", only, "--out", str(tmp_path)]) == 0
    document = json.loads(next(tmp_path.glob("prefill-*.json")).read_text())
    suites = {row["suite"]: row for row in document["rows"]}
    assert set(suites) == {"dense", "options", "packed", "continuation"}
    assert {"torch flash", "cuDNN"} <= set(suites["dense"]["ratios"])
    for suite in ("options", "packed", "continuation"):
        assert any(name.startswith("flashq ") for name in suites[suite]["ratios"])
    assert suites["continuation"]["name"].startswith("continuation fp16 ")
    assert "TFLOP/s" in capsys.readouterr().out
