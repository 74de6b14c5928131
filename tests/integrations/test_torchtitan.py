"""torchtitan's Trainer with a compiled config matches the eager config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.parity.trainers import run_trainer
from helpers.releases.skip import skip_before

PROGRAM = Path(__file__).parent / "programs" / "torchtitan_trainer.py"
ONCE = ["forward", "backward"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3 takes Python 3.11"),
]


@pytest.mark.parametrize(
    ("scenario", "graphs"),
    [
        ("verified", ONCE),
        ("selective checkpointing", ONCE),
        ("full checkpointing", ONCE),
        ("chunked loss", 2 * ONCE),  # it sets `reshard_after_forward` after the first step
        ("resumed", ONCE),
    ],
)
def test_compiled_training_matches_eager(scenario: str, graphs: list[str], tmp_path: Path) -> None:
    skip_before("2.13")  # torchtitan imports names that torch 2.13 added
    for result in run_trainer(tmp_path, PROGRAM, scenario):
        assert result.differing == []
        assert len(set(result.losses)) == len(result.losses)
        assert result.graphs == graphs
