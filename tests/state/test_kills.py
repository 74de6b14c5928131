"""Checkpoints survive the kill of a rank during a save."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from compile_fsdp.state import load, optim_state_dict
from helpers.faults.killed_saves import STAGES, train_one_step_and_save
from helpers.models.optimizers import assert_same, train, trained


@pytest.mark.timeout(900)  # a kill takes one to ten seconds on a busy machine
@pytest.mark.parametrize(
    "in_background", [pytest.param(False, id="save"), pytest.param(True, id="async_save", marks=pytest.mark.slow)]
)
def test_ten_kills_during_saves_lose_no_checkpoint(in_background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train_one_step_and_save(folder, None, 0, in_background) == [0, 0]
    reference, reference_optim = trained()
    train(reference, reference_optim, [0])
    step = 1
    for stage in STAGES:
        for victim in (0, 1):
            codes = train_one_step_and_save(folder, stage, victim, in_background)
            assert codes[victim] == -signal.SIGKILL, (stage, victim)
            # Rank 0 alone finishes the save after the write, even if rank 1 dies.
            if stage == "after the marker" or (victim == 1 and stage in ("before the rename", "before the marker")):
                train(reference, reference_optim, [step])
                step += 1
            loaded, loaded_optim = trained()
            assert load(loaded, loaded_optim, folder) == step, (stage, victim)
            expected = optim_state_dict(reference, reference_optim)
            assert_same(optim_state_dict(loaded, loaded_optim), expected, exact=False)
    assert step == 5
    assert train_one_step_and_save(folder, None, 0, in_background) == [0, 0]
    assert not list(folder.glob("*.part"))
