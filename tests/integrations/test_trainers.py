"""A trainer's compiled run matches its eager run: losses, parameters and number of graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.parity.trainers import run_trainer
from helpers.releases.skip import skip_before

PROGRAMS = Path(__file__).parent / "programs"
STEP = ["forward", "backward"]
ACCUMULATED = [*STEP, "backward"]  # the first microbatch reduces no gradients
EVALUATED = [*STEP, "forward"]
GRAPHS = {
    "accelerate_loop": dict.fromkeys(("aot_eager", "activation checkpointing", "resumed", "inductor"), ACCUMULATED),
    "fabric_loop": dict.fromkeys(("verified", "bf16-mixed", "resumed", "inductor"), ACCUMULATED),
    "lightning_trainer": {
        **dict.fromkeys(("verified", "accumulation", "bf16-mixed", "clipped", "resumed", "inductor"), STEP),
        "validation": EVALUATED,
    },
    "torchtitan_trainer": {
        **dict.fromkeys(("verified", "selective checkpointing", "full checkpointing", "resumed"), STEP),
        "chunked loss": 2 * STEP,  # it sets `reshard_after_forward` after the first step
    },
    "transformers_trainer": {
        **dict.fromkeys(("plain", "verified", "activation checkpointing", "gradient checkpointing", "bf16"), STEP),
        **dict.fromkeys(("lora", "resumed", "inductor"), STEP),
        "accumulation": ACCUMULATED,
        "evaluation": EVALUATED,
    },
}
QUICK = {("accelerate_loop", "aot_eager"), ("lightning_trainer", "verified"), ("transformers_trainer", "plain")}


def _rows() -> list[object]:
    rows = [(program, scenario) for program, scenarios in GRAPHS.items() for scenario in scenarios]
    return [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.slow) for row in rows]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("program", "scenario"), _rows())
def test_compiled_training_matches_eager(program: str, scenario: str, tmp_path: Path) -> None:
    if program == "torchtitan_trainer":
        skip_before("2.13")  # torchtitan imports names that torch 2.13 added
        if sys.version_info < (3, 11):
            pytest.skip("torchtitan 0.3 takes Python 3.11")
    for result in run_trainer(tmp_path, PROGRAMS / f"{program}.py", scenario):
        assert result.directions == GRAPHS[program][scenario]
        if scenario == "inductor":  # fused ops round differently
            assert result.worst < 1e-5
        else:
            assert result.differing == []
            assert len(set(result.losses)) == len(result.losses)
