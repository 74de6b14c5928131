"""Twenty times, ten of them in the background, a rank is killed while a checkpoint is written; nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from compile_fsdp.state import load, optim_state_dict
from helpers.faults.killed_saves import STAGES, make_run, train_one_step_and_save
from helpers.models.optimizers import assert_same, train


@pytest.mark.timeout(900)  # beside other work, a kill takes from one second to ten
@pytest.mark.parametrize(
    "in_background", [pytest.param(False, id="save"), pytest.param(True, id="async_save", marks=pytest.mark.slow)]
)
def test_ten_kills_lose_nothing(in_background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train_one_step_and_save(folder, None, 0, in_background) == [0, 0]
    reference, reference_optim = make_run(sharded=False)
    train(reference, reference_optim, [0])
    step = 1
    for stage in STAGES:
        for victim in (0, 1):
            codes = train_one_step_and_save(folder, stage, victim, in_background)
            assert codes[victim] == -signal.SIGKILL, (stage, victim)
            # All that is left to do after the write is done by rank 0, whoever else dies.
            if stage == "after the marker" or (victim == 1 and stage in ("before the rename", "before the marker")):
                train(reference, reference_optim, [step])
                step += 1
            loaded, loaded_optim = make_run(sharded=False)
            assert load(loaded, loaded_optim, folder) == step, (stage, victim)
            expected = optim_state_dict(reference, reference_optim)
            assert_same(optim_state_dict(loaded, loaded_optim), expected, exact=False)
    assert step == 5
    assert train_one_step_and_save(folder, None, 0, in_background) == [0, 0]
    assert not list(folder.glob("*.part"))
