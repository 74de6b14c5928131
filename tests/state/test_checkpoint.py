"""Checkpoints are complete or absent; a background save holds its start state."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compile_fsdp import fully_shard
from compile_fsdp.errors import CheckpointError, StateMismatchError
from compile_fsdp.state import async_save, checkpoint, find_latest, folder, load, optim_state_dict, save
from helpers.models.optimizers import assert_same, train, trained, whole
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks


def _assert_at(path: Path, step: int) -> None:
    """Check that the newest checkpoint has the state of `step`."""
    loaded, expected = trained(), trained(step)
    assert load(*loaded, path) == step
    assert_same(optim_state_dict(*loaded), optim_state_dict(*expected))
    for name, value in expected[0].state_dict().items():
        assert torch.equal(loaded[0].state_dict()[name], value)


def _names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_save_and_load_without_a_process_group(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way"
    assert find_latest(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = save(*trained(2), path, 2, files={"notes.txt": "of step 2"})
        _assert_at(path, 2)
    assert target == find_latest(path) == path / "step-00000002"
    assert (target / "notes.txt").read_text() == "of step 2"
    save(*trained(3), path, 3)
    _assert_at(path, 3)
    _assert_at(target, 2)  # a given checkpoint


class Interrupted(Exception):
    """Raised on purpose in a save."""


@pytest.mark.parametrize("stage", ["write_tensors", "rename", "replace"])
@pytest.mark.parametrize("step", [2, 3], ids=["same step", "next step"])
def test_interrupted_save_keeps_the_previous_checkpoint(
    stage: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(*trained(2), tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if stage == "write_tensors" else folder.os, stage, Mock(side_effect=Interrupted))
        with pytest.raises((Interrupted, CheckpointError)):
            save(*trained(3), tmp_path, step)
    _assert_at(tmp_path, 2)
    save(*trained(4), tmp_path, 4)
    _assert_at(tmp_path, 4)
    assert not any(name.endswith(".part") for name in _names(tmp_path))


def test_repeated_save_of_a_step_replaces_its_checkpoint(tmp_path: Path) -> None:
    for steps in (2, 3, 4):
        save(*trained(steps), tmp_path, 7)
        loaded = trained()
        assert load(*loaded, tmp_path) == 7
        assert_same(optim_state_dict(*loaded), optim_state_dict(*trained(steps)))
        assert len(_names(tmp_path)) == 2


def test_path_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    run = trained()
    with pytest.raises(CheckpointError, match="found none"):
        load(*run, tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    for call in (lambda: load(*run, file), lambda: save(*run, file, 1), lambda: find_latest(file)):
        with pytest.raises(CheckpointError, match=f"got the file {file}"):
            call()
    (tmp_path / "latest").write_text("step-00000009\n")
    with pytest.raises(CheckpointError, match="names step-00000009, which is no complete checkpoint"):
        load(*run, tmp_path)
    others = ({"weights": torch.ones(2)}, {"model": [torch.ones(2)], "optimizer": {"param_groups": []}})
    for i, other in enumerate((*others, {"model": {"weight": torch.ones(2)}, "optimizer": torch.ones(2)})):
        torch_save(other, checkpoint_id=tmp_path / f"other-{i}", no_dist=True)
        with pytest.raises(CheckpointError, match=re.escape(f"got one of {sorted(other)}")):
            load(*run, tmp_path / f"other-{i}")


def test_full_disk_is_reported_and_keeps_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(*trained(2), tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=r"cannot write .*step-00000003.part: rank 0: OSError: .*No space"):
            save(*trained(3), tmp_path, 3)
        pending = async_save(*trained(3), tmp_path, 3)
        with pytest.raises(CheckpointError, match="No space"):
            pending.wait()
    _assert_at(tmp_path, 2)


class Described(nn.Linear):
    """Linear layer with a buffer and non-tensor state."""

    def __init__(self, note: str) -> None:
        super().__init__(4, 4)
        self.register_buffer("running", torch.zeros(3))
        self.note = note

    def get_extra_state(self) -> Any:
        return {"note": self.note, "values": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        assert state["values"] == [1, 2]
        self.note = state["note"]


def test_buffers_and_extra_state_are_saved_and_loaded(tmp_path: Path) -> None:
    model = Described("as saved")
    model.running.fill_(3.0)
    save(model, torch.optim.SGD(model.parameters()), tmp_path, 1)
    other = Described("as made")
    load(other, torch.optim.SGD(other.parameters()), tmp_path)
    assert other.note == "as saved" and torch.equal(other.running, torch.full((3,), 3.0))


def _torch_reads_ours_and_we_read_torchs(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    # All parameters get gradients, because torch needs state for each trainable parameter.
    model, optim = trained(2, mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    expected = optim_state_dict(model, optim)
    target = save(model, optim, path, 3)

    other, other_optim = trained(0, mesh)
    weights, state = get_state_dict(other, other_optim)
    torch_load({"model": weights, "optimizer": state}, checkpoint_id=target)
    set_state_dict(other, other_optim, model_state_dict=weights, optim_state_dict=state)
    trainable = [name for name, parameter in other.named_parameters() if parameter.requires_grad]
    got = optim_state_dict(other, other_optim)
    for fqn in trainable:
        for key, value in expected["state"][fqn].items():
            assert torch.equal(whole(got["state"][fqn][key]), whole(value)), (fqn, key)

    weights, state = get_state_dict(model, optim)
    torch_save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/torch")
    other, other_optim = trained(0, mesh)
    with pytest.raises(StateMismatchError, match="missing: step"):
        load(other, other_optim, f"{path}/torch")
    assert load(other, other_optim, f"{path}/torch", strict=False) == 0
    assert_same(optim_state_dict(other, other_optim), expected)


def test_checkpoints_are_interchangeable_with_torch(tmp_path: Path) -> None:
    run_ranks(2, _torch_reads_ours_and_we_read_torchs, str(tmp_path))


def _training_goes_on_during_a_save(rank: int, path: str, name: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(2, mesh, name)
    expected = optim_state_dict(model, optim, full=True)
    weights = {key: whole(value).clone() for key, value in model.state_dict().items()}
    pending = async_save(model, optim, path, 2, files={"notes.txt": "background"})
    train(model, optim, range(2, 12))  # training and save run collectives concurrently
    target = pending.wait()
    assert pending.done() and pending.wait() == target
    loaded, loaded_optim = trained(0, mesh, name)
    assert load(loaded, loaded_optim, path) == 2
    assert_same(optim_state_dict(loaded, loaded_optim), expected)
    assert all(torch.equal(whole(value), weights[key]) for key, value in loaded.state_dict().items())
    assert (target / "notes.txt").read_text() == "background"
    train(loaded, loaded_optim, range(2, 12))
    assert_same(optim_state_dict(loaded, loaded_optim), optim_state_dict(model, optim))


class _Extra(nn.Linear):
    """Has extra state, which it loads, or refuses to."""

    def __init__(self, extra: object, refuses: bool = False) -> None:
        super().__init__(2, 2)
        self.extra, self.refuses = extra, refuses

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise ValueError("refused")
        self.extra = state


def _stepped(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    return model, optim


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {0: 1.5},
        {"a": {}, "b": {"c": torch.ones(2)}},
        {"a": [{0: torch.ones(2)}, {}]},
        [{0: 1.5}],
        {"a": [1, 2]},
        3,
    ],
)
def test_extra_state_is_loaded_as_it_was(extra: object, tmp_path: Path) -> None:
    save(*_stepped(_Extra(extra)), tmp_path, 1)
    model, optim = _stepped(_Extra(None))
    load(model, optim, tmp_path)
    assert repr(model.extra) == repr(extra)


def test_refused_extra_state_leaves_the_optimizer_unchanged(tmp_path: Path) -> None:
    save(*_stepped(_Extra(1)), tmp_path, 1)
    model = _Extra(1, refuses=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match="refused"):
        load(model, optim, tmp_path)
    assert not optim.state and optim.param_groups[0]["lr"] == 0.5


def _make_stage(rank: int, mesh: DeviceMesh, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.ModuleDict({str(rank): fully_shard(nn.Linear(4, 4), mesh=mesh)})
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


@on_ranks(2)
def test_stages_of_a_pipeline_share_a_checkpoint(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    model, optim = _make_stage(rank, mesh, 0.1)
    model[str(rank)](torch.ones(2, 4)).sum().backward()  # type: ignore[index]
    optim.step()
    save(model, optim, tmp_path, 1)
    other, other_optim = _make_stage(rank, mesh, 0.5)
    assert load(other, other_optim, tmp_path) == 1
    assert_same(optim_state_dict(other, other_optim), optim_state_dict(model, optim))
    assert other_optim.param_groups[0]["lr"] == 0.1
    if rank == 0:
        model["more"] = nn.Linear(2, 2)  # type: ignore[operator]
    save(model, optim, tmp_path, 2)
    with pytest.raises(StateMismatchError, match=r"unexpected: more.bias, more.weight\."):
        load(other, other_optim, tmp_path)


@on_ranks(2, timeout_s=60.0)
def test_ranks_may_have_different_working_directories(rank: int, tmp_path: Path) -> None:
    model, optim = trained(1, init_device_mesh("cpu", (2,)))
    folder, before = tmp_path / str(rank), Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        async_save(model, optim, "checkpoints", 1)
        assert save(model, optim, "checkpoints", 2).parent == tmp_path / "0" / "checkpoints"
        assert load(model, optim, "checkpoints") == 2
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", ["adamw_fused", "hoarder"])
def test_training_goes_on_during_a_save(name: str, tmp_path: Path) -> None:
    run_ranks(2, _training_goes_on_during_a_save, str(tmp_path), name)


def _saves_and_loads_wait_for_a_running_save(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(1, mesh)
    for step in range(1, 4):
        async_save(model, optim, path, step)
        train(model, optim, [step])
    assert load(*trained(0, mesh), path) == 3
    save(model, optim, path, 4)
    assert load(*trained(0, mesh), path) == 4
    dist.barrier()
    assert _names(Path(path)) == {"latest", *(f"step-0000000{step}" for step in range(1, 5))}


def test_saves_and_loads_wait_for_a_running_save(tmp_path: Path) -> None:
    run_ranks(2, _saves_and_loads_wait_for_a_running_save, str(tmp_path))


def test_next_save_raises_error_of_failed_background_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(*trained(2), tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "rename", Mock(side_effect=OSError("read-only file system")))
        pending = async_save(*trained(3), tmp_path, 3)
        while not pending.done():
            pass
        with pytest.raises(CheckpointError, match="read-only file system"):
            save(*trained(4), tmp_path, 4)
    _assert_at(tmp_path, 2)
    save(*trained(4), tmp_path, 4)
    _assert_at(tmp_path, 4)
