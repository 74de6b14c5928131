"""A loop with our `prepare` matches a loop with accelerate's `prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.parity.trainers import run_trainer

PROGRAM = Path(__file__).parent / "programs" / "accelerate_loop.py"
# A step has two microbatches; the first reduces no gradients.
GRAPHS = ["forward", "backward", "backward"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("activation checkpointing", "resumed")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", ["aot_eager", *SLOW])
def test_compiled_loop_matches_eager(scenario: str, tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAM, scenario):
        assert result.differing == []
        assert len(set(result.losses)) == len(result.losses)
        assert result.graphs == GRAPHS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_loop_matches_eager_within_tolerance(tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAM, "inductor"):
        assert result.worst < 1e-5
        assert result.graphs == GRAPHS
