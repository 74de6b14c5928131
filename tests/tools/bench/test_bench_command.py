"""`compile-fsdp bench` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_fsdp.cli import main
from compile_fsdp.tools.bench.measure import peak_bytes
from compile_fsdp.tools.bench.modes import SIMPLE_FSDP


@pytest.mark.parametrize("modes", [["eager"], pytest.param(["eager", "compile"], marks=pytest.mark.slow)])
def test_modes_are_measured_on_two_ranks(modes: list[str], tmp_path: Path) -> None:
    options = ["--model", "overhead", "--modes", ",".join(modes), "--rounds", "2", "--json", "out.json"]
    command = [sys.executable, "-m", "compile_fsdp", "bench", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    head = json.loads((tmp_path / "out.json").read_text())
    assert (head["torch"], head["ranks"], head["device"]) == (torch.__version__, 2, "cpu")
    results = head["results"]["overhead"]
    assert list(results) == modes
    assert results["eager"]["ratio"] == 1
    # Two all-gathers and one reduce-scatter for each of eight layers, one of each for the root.
    assert results["eager"]["collectives"] == 26
    for each in results.values():
        lower, upper = each["spread"]
        assert 0 < lower <= each["ratio"] <= upper
        assert each["step_ms"] > 0 and each["first_step_s"] > 0 and each["peak_mib"] > 0 and each["collectives"] > 0
    assert all(f"| `{mode}` |" in done.stdout for mode in modes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--modes", "eager,fast"], "expected --modes among eager, block"),
        (["--modes", "block"], "expected eager among --modes"),
        (["--rounds", "1"], "expected at least 2 rounds and 1 rank, got --rounds 1"),
        (["--model", "large"], "expected --model among overhead, mid, dropout, compute, got large"),
        (["--json", "missing/f.json"], "expected a file that can be written, got missing/f.json"),
        (["--script"], "expected a training script behind --script, got nothing"),
        (["--modes", "eager", "--script", "train.py"], "expected no --modes and no --model with --script"),
        (["--modes", "eager,simple"], "put a checkout of torchtitan on PYTHONPATH"),
    ],
)
def test_bad_options_are_one_line_errors(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # as if torchtitan were not installed
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # fewer than ranks, which is checked last
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_missing_dependency_of_torchtitan_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path.joinpath(*SIMPLE_FSDP.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text("import what_torchtitan_needs\n")
    for folder in (each for each in file.parents if each.is_relative_to(tmp_path / "torchtitan")):
        (folder / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)  # modules of an installed torchtitan
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["bench", "--modes", "eager,simple"]) == 2
    assert "compile-fsdp bench needs what_torchtitan_needs" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "expected at most one rank per GPU of this host, got --ranks 2 for 1; pass --ranks 1" in error


@pytest.mark.usefixtures("one_rank")
def test_peak_counts_only_tensors_alive_together() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8)
        kept.append(torch.empty(2**21, dtype=torch.uint8))
        torch.empty(2**20, dtype=torch.uint8)

    assert 3 * 2**20 <= peak_bytes(run, torch.device("cpu")) < 3 * 2**20 + 2**12
