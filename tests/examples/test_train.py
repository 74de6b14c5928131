"""examples/train.py on two ranks: learns, resumes, and compiled losses equal eager losses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.device.extension import build
from helpers.ranks.forked import run_forked

TEXT = "the quick brown fox jumps over the lazy dog; " * 400
SCRIPT = """\
from helpers.faults.example import load_example

load_example(layers=2, seq_len=32).main()
"""
# To go before the script: ranks of two machines, each of which has one emulated device.
ON_ONE_DEVICE_EACH = """\
import os
from helpers.device.install import install

install()
os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
"""

Train = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains a model of two blocks on two ranks; returns summary.json and the output."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*options: object, before: str = "") -> tuple[dict[str, Any], str]:
        (tmp_path / "script.py").write_text(before + SCRIPT)
        output = run_forked(tmp_path, "script.py", "--data", "text.txt", "--output", "out", *options)
        return json.loads((tmp_path / "out" / "summary.json").read_text()), output

    return run


@pytest.mark.timeout(900)
def test_run_learns_prints_a_summary_and_resumes_bit_by_bit(train: Train, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    save = ["--checkpoint", checkpoints, "--save-every", 1, "--eager"]
    whole, output = train("--steps", 6, "--eager")
    assert whole["losses"][-1] < whole["losses"][0] - 0.2
    assert len(whole["cold_step_s"]) + len(whole["warm_step_s"]) == len(whole["losses"]) == 6
    for part in ("0.0 M parameters", "step 6/6: loss", "steps         0 to 6", "peak memory", "loss.png"):
        assert part in output
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")

    checkpoints.mkdir()
    (checkpoints / "step-notes").mkdir()  # the user's own
    first, _ = train("--steps", 3, *save)
    assert first["losses"] == whole["losses"][:3]
    second, output = train("--steps", 6, *save)
    assert f"resumed from {checkpoints / 'step-00000003'} at step 3\n" in output
    assert (second["losses"], second["first_step"]) == (whole["losses"], 3)
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-00000005", "step-00000006", "step-notes"}
    _, output = train("--steps", 6, *save)
    assert "nothing to do: 6 steps were done already" in output


@pytest.mark.timeout(900)
def test_compiled_run_continues_an_eager_one(train: Train, tmp_path: Path) -> None:
    save = ["--checkpoint", tmp_path / "checkpoints"]
    whole, _ = train("--steps", 4, "--eager")
    train("--steps", 2, "--eager", *save)
    resumed, output = train("--steps", 4, *save)  # with Inductor
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert len(resumed["cold_step_s"]) == 1
    assert "1 forward, 1 backward\n" in output and re.search(r"ops removed   [1-9]\d* copies", output)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_losses_equal_eager_losses_on_two_accelerators(train: Train) -> None:
    build()
    eager, _ = train("--steps", 3, "--eager", before=ON_ONE_DEVICE_EACH)
    compiled, output = train("--steps", 3, before=ON_ONE_DEVICE_EACH)
    assert compiled["device"] == eager["device"] == "emulated"
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert compiled["peak_memory_bytes"] > 0 and "1 forward, 1 backward\n" in output
