"""Hugging Face's Trainer with the callback matches the eager Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.parity.trainers import run_trainer

PROGRAM = Path(__file__).parent / "programs" / "transformers_trainer.py"
GRAPHS = {
    "accumulation": ["forward", "backward", "backward"],  # one without and one with gradient reduction
    "evaluation": ["forward", "backward", "forward"],
}
SCENARIOS = [
    "plain",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "verified",
            "accumulation",
            "activation checkpointing",
            "gradient checkpointing",
            "bf16",
            "lora",
            "evaluation",
            "resumed",
        )
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_compiled_training_matches_eager(scenario: str, tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAM, scenario):
        assert result.differing == []
        assert len(set(result.losses)) == len(result.losses)
        assert result.graphs == GRAPHS.get(scenario, ["forward", "backward"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_training_matches_eager_within_tolerance(tmp_path: Path) -> None:
    for result in run_trainer(tmp_path, PROGRAM, "inductor"):
        assert result.worst < 1e-5
        assert result.graphs == ["forward", "backward"]
