"""`python -m flashq info` and the facts behind it."""

import platform
import subprocess
import sys

import pytest
import torch

import flashq
from flashq.cli import info, machine, main


def test_command_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "flashq", "info"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in (flashq.__version__, torch.__version__, platform.python_version(), flashq.tbq4.FINGERPRINT):
        assert text in done.stdout


def test_tells_levels_threads_and_libraries() -> None:
    facts = info.collect()
    levels = machine.cpu_levels()
    assert levels.available[0] == "portable"
    assert facts["CPU level"].startswith(levels.selected)
    assert f"{torch.get_num_threads()} threads" in facts["CPU"]
    assert facts["libflashq.so"].startswith("loaded, built with")
    assert facts["TBQ4 tables"].endswith("the published tables")


def test_missing_parts_come_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = flashq.libraries._replace(cuda_problem="no CUDA: install nvcc", module_problem="no _C: install again")
    monkeypatch.setattr(flashq, "libraries", broken)
    missing = info.collect_missing()
    assert missing[:2] == ["no CUDA: install nvcc", "no _C: install again"]
    assert info.collect()["libflashq_cuda.so"] == "not loaded"


def test_cuda_overrides_are_shown_where_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FLASHQ_CUDA_ARCH", "FLASHQ_CUDA_SMEM")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert "CUDA overrides" not in info.collect()
    monkeypatch.setenv(names[1], "65536")
    assert info.collect()["CUDA overrides"] == "FLASHQ_CUDA_SMEM=65536"
    monkeypatch.setenv(names[0], "81")
    assert info.collect()["CUDA overrides"] == "FLASHQ_CUDA_ARCH=81, FLASHQ_CUDA_SMEM=65536"
    problem = "FLASHQ_CUDA_ARCH: expected 80 or nothing, got 81."
    assert (problem in info.collect_missing()) == (flashq.libraries.cuda_problem is None)


def test_unsupported_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashq, "libraries", flashq.libraries._replace(cuda_problem=None, cuda_archs="8.0;9.0a"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert "compute capability 7.0" in info.collect()["GPU"]
    assert any("expected 8.0" in line for line in info.collect_missing())


def test_unknown_level_is_an_error() -> None:
    before = machine.cpu_levels().selected
    with pytest.raises(ValueError, match="expected one of portable"), machine.cpu_level("sse9"):
        pass
    with machine.cpu_level("portable"):
        assert machine.cpu_levels().selected == "portable"
    assert machine.cpu_levels().selected == before


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["nothing"])
    assert "selftest" in capsys.readouterr().err
