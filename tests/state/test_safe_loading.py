"""`load` refuses a checkpoint that would run code when unpickled."""

from __future__ import annotations

import enum
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from compile_fsdp.errors import CheckpointError
from compile_fsdp.state import load, save


class _Call:
    """Object that calls a function when unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


class _PicklerOfEarly311(pickle.Pickler):
    """Pickler that encodes enum members as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


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


def _load_with_metadata(folder: Path, planner_data: Any) -> None:
    """Save, put an object into the checkpoint's metadata, and load."""
    checkpoint = save(*_training(), folder / "run", step=1)
    metadata = _metadata(checkpoint)
    metadata.planner_data = planner_data
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    load(*_training(), checkpoint)


def test_metadata_that_runs_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected only descriptions of tensors in \.metadata, got posix\.mkdir"):
        _load_with_metadata(tmp_path, _Call(os.mkdir, str(tmp_path / "harm")))
    assert not (tmp_path / "harm").exists()


def test_metadata_of_early_python_311_is_read(tmp_path: Path) -> None:
    checkpoint = save(*_training(), tmp_path / "run", step=1)
    buffer = io.BytesIO()
    _PicklerOfEarly311(buffer).dump(_metadata(checkpoint))
    assert b"getattr" in buffer.getvalue()
    (checkpoint / ".metadata").write_bytes(buffer.getvalue())
    assert load(*_training(), checkpoint) == 1


_MEMORY_FORMATS = next(type(each) for each in TensorProperties().__getstate__() if isinstance(each, enum.Enum))


@pytest.mark.parametrize("subject", [torch.Size, _MEMORY_FORMATS])
def test_metadata_with_attribute_other_than_enum_member_is_refused(tmp_path: Path, subject: type[Any]) -> None:
    with pytest.raises(CheckpointError, match=r"expected only descriptions .* got builtins\.getattr of __base__"):
        _load_with_metadata(tmp_path, _Call(getattr, subject, "__base__"))


def test_value_that_runs_code_is_refused(tmp_path: Path) -> None:
    model, optim = _training()
    optim.param_groups[0]["note"] = _Call(os.mkdir, str(tmp_path / "harm"))
    checkpoint = save(model, optim, tmp_path / "run", step=1)
    shutil.rmtree(tmp_path / "harm", ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"mkdir"):
        load(*_training(), checkpoint)
    assert not (tmp_path / "harm").exists()


def test_objects_load_only_if_the_user_allows_their_class(tmp_path: Path) -> None:
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
