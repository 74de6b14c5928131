"""The GPU kit reports the output of each step, also if the step fails or times out."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kit() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_kit_run", BENCHMARKS / "gpu_kit" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_kit_run"] = module
    spec.loader.exec_module(module)
    return module


def _step(kit: Any, folder: Path, title: str, code: str, limit_s: float = 60.0) -> Any:
    path = folder / f"{title}.py"
    path.write_text(code)
    return kit.Step(title, (str(path),), limit_s)


def test_report_has_output_of_each_step(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        _step(kit, tmp_path, "good", "import sys; print('equal', sys.argv[1:])"),
        _step(kit, tmp_path, "bad", "print('begun', flush=True); raise ValueError('what was wrong')"),
        _step(kit, tmp_path, "endless", "import time; print('begun', flush=True); time.sleep(600)", limit_s=6.0),
    )
    monkeypatch.setattr(kit, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--device", "cpu"])
    assert kit.main() == 1
    head, good, bad, endless = (tmp_path / "gpu.md").read_text().split("\n## ")
    assert "compile_fsdp on cpu" in head
    assert good.startswith("good\n") and "equal ['--device', 'cpu']" in good and "failed" not in good
    assert "begun" in bad and "**failed** with exit status 1" in bad and "what was wrong" in bad
    assert "begun" in endless and "**failed**: ended after " in endless


def test_steps_without_time_left_are_marked_not_run(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "STEPS", (_step(kit, tmp_path, "late", ""),))
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--device", "cpu", "--limit-s", "1"])
    assert kit.main() == 0
    assert (tmp_path / "gpu.md").read_text().endswith("## late\n\nnot run: no time left\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gpu_kit_passes_on_cpu(tmp_path: Path) -> None:
    command = ["bash", str(BENCHMARKS / "gpu.sh"), str(tmp_path), "--device", "cpu", "--limit-s", "900"]
    subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, check=True)
    report = (tmp_path / "gpu.md").read_text()
    assert "failed" not in report and "not run" not in report
    assert "Graphs: forward, backward." in report
