"""A checkpoint that would run code when it is unpickled does not run it."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from compile_fsdp.errors import CheckpointError
from compile_fsdp.state import load, save


class _Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class _Setting:
    """An object in an optimizer's options."""


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    return model, optim


def _metadata(checkpoint: Path) -> Metadata:
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return metadata


def test_harmful_metadata(tmp_path: Path) -> None:
    model, optim = _training()
    checkpoint = save(model, optim, tmp_path / "run", step=1)
    metadata = _metadata(checkpoint)
    metadata.planner_data = _Harmful(tmp_path / "harm")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"expected only descriptions of tensors in \.metadata, got posix\.mkdir"):
        load(model, optim, checkpoint)
    assert not (tmp_path / "harm").exists()


def test_harmful_value(tmp_path: Path) -> None:
    model, optim = _training()
    optim.param_groups[0]["note"] = _Harmful(tmp_path / "harm")
    checkpoint = save(model, optim, tmp_path / "run", step=1)
    shutil.rmtree(tmp_path / "harm", ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"mkdir"):
        load(*_training(), checkpoint)
    assert not (tmp_path / "harm").exists()


def test_objects_that_the_user_allows(tmp_path: Path) -> None:
    model, optim = _training()
    optim.param_groups[0]["note"] = _Setting()
    checkpoint = save(model, optim, tmp_path / "run", step=1)
    fresh, fresh_optim = _training()
    fresh_optim.param_groups[0]["note"] = None
    with pytest.raises(CheckpointError, match=r"add_safe_globals"):
        load(fresh, fresh_optim, checkpoint)
    with torch.serialization.safe_globals([_Setting]):
        assert load(fresh, fresh_optim, checkpoint) == 1
    assert isinstance(fresh_optim.param_groups[0]["note"], _Setting)
    assert torch.equal(fresh.weight, model.weight)
