"""Resuming continues the same run, and an interrupted save harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_fsdp.cli import main
from compile_fsdp.state import checkpoint as saving
from compile_fsdp.tools.train.checkpoint import differences

Train = Callable[..., dict[str, Any]]
Run = Callable[..., str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_resumed_run_equals_the_uninterrupted_one(
    train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("--steps", 6)
    first = train("--steps", 3, "--checkpoint", checkpoint)
    assert "starting at step 0" in capsys.readouterr().out
    second = train("--steps", 6, "--checkpoint", checkpoint)
    assert f"resumed from {checkpoint / 'step-00000003'} at step 3\n" in capsys.readouterr().out
    assert first["losses"] == whole["losses"][:3]
    assert second["losses"] == whole["losses"]
    assert second["first_step"] == 3


def test_nothing_left_to_do(train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train("--steps", 2, "--checkpoint", checkpoint)
    again = train("--steps", 2, "--checkpoint", checkpoint)
    assert again["losses"] == first["losses"]
    assert "none: 2 were done already" in capsys.readouterr().out


def test_a_change_of_the_data_is_announced(
    train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", 1, "--checkpoint", checkpoint)
    train("--steps", 2, "--checkpoint", checkpoint, "--seed", 5)
    assert "batches are others than before, because seed was 0 and is 5\n" in capsys.readouterr().out


def test_interrupted_save_leaves_the_previous_checkpoint(
    train: Train, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train("--steps", 2, "--checkpoint", checkpoint)

    def save_half(state: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", save_half)
        with pytest.raises(AssertionError, match="130"):  # exit status after an interrupt
            train("--steps", 4, "--checkpoint", checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {"latest", "step-00000002", "step-00000004.part"}

    second = train("--steps", 4, "--checkpoint", checkpoint)
    assert second["first_step"] == 2
    assert second["losses"][:2] == first["losses"]
    assert {path.name for path in checkpoint.iterdir()} == {"latest", "step-00000002", "step-00000004"}


def test_only_the_newest_checkpoints_are_kept(train: Train, checkpoint: Path) -> None:
    checkpoint.mkdir()
    (checkpoint / "step-notes").mkdir()  # the user's own
    train("--steps", 4, "--checkpoint", checkpoint, "--save-every", 1)
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {"latest", "step-00000003", "step-00000004", "step-notes"}
    assert (checkpoint / "latest").read_text() == "step-00000004\n"


def refused(checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The message of a run that does not start."""
    common = ["train", "--mode", "eager", "--device", "cpu", "--data", str(text), "--steps", "2"]
    assert main([*common, "--checkpoint", str(checkpoint), *args]) == 2
    return capsys.readouterr().err


def test_another_model_is_refused(
    train: Train, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", 1, "--checkpoint", checkpoint)
    message = refused(checkpoint, text, capsys, "--preset", "small", "--tie-embeddings")
    for part in ("does not fit the model", "dim was 128 and is 384", "layers was 4", "tie_embeddings was"):
        assert part in message


def test_a_file_is_refused(checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.write_text("")
    assert f"got the file {checkpoint}" in refused(checkpoint, text, capsys)


def test_a_marker_without_its_folder_is_refused(
    checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.mkdir()
    (checkpoint / "latest").write_text("step-00000009\n")
    assert "names step-00000009, which is no complete checkpoint" in refused(checkpoint, text, capsys)


def test_a_damaged_description_is_refused(
    train: Train, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", 1, "--checkpoint", checkpoint)
    (checkpoint / "step-00000001" / "run.json").write_text("{")
    assert "cannot read" in refused(checkpoint, text, capsys)


def test_differences_names_all_of_them() -> None:
    saved, now = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}
    assert differences(saved, now) == "b was 2 and is 5, d was None and is 4"


@pytest.mark.timeout(1200)
def test_two_ranks_resume_their_own_and_one_rank_takes_over(
    train: Train, train_on_two_ranks: Train, eager_on_two_ranks: Any, two_blocks: None, checkpoint: Path
) -> None:
    whole = eager_on_two_ranks.whole
    eager_on_two_ranks.checkpoint(checkpoint)
    resumed = train_on_two_ranks("--mode", "eager", "--steps", 3, "--checkpoint", checkpoint)
    assert resumed["losses"] == whole["losses"][:3]
    # The same sequences on one rank: the global batch, and so the loss, stays what it was.
    alone = train("--steps", 4, "--checkpoint", checkpoint, "--batch-size", 4)
    assert alone["first_step"] == 3
    assert alone["losses"] == pytest.approx(whole["losses"][:4], rel=1e-5)
