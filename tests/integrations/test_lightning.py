"""Compiled runs of Fabric and Lightning's Trainer match eager runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.parity.trainers import run_trainer

PROGRAMS = Path(__file__).parent / "programs"
SLOW = [
    ("fabric_loop", "verified"),
    ("fabric_loop", "bf16-mixed"),
    ("fabric_loop", "resumed"),
    ("lightning_trainer", "accumulation"),
    ("lightning_trainer", "bf16-mixed"),
    ("lightning_trainer", "clipped"),
    ("lightning_trainer", "resumed"),
    ("lightning_trainer", "validation"),
]
GRAPHS = {
    "fabric_loop": ["forward", "backward", "backward"],  # the first of two microbatches reduces no gradients
    "lightning_trainer": ["forward", "backward"],
    ("lightning_trainer", "validation"): ["forward", "backward", "forward"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "scenario"),
    [
        ("lightning_trainer", "verified"),
        *(pytest.param(*names, marks=pytest.mark.slow) for names in SLOW),
    ],
)
def test_compiled_training_matches_eager(program: str, scenario: str, tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAMS / f"{program}.py", scenario):
        assert result.differing == []
        assert len(set(result.losses)) == len(result.losses)
        assert result.graphs == GRAPHS.get((program, scenario), GRAPHS[program])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["fabric_loop", "lightning_trainer"])
def test_inductor_training_matches_eager_within_tolerance(program: str, tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAMS / f"{program}.py", "inductor"):
        assert result.worst < 1e-5
        assert result.graphs == GRAPHS[program]
