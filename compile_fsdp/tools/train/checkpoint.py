"""The checkpoints of a training run: checkpoints of `compile_fsdp.state`, each with a run.json that describes the run.

For the folder's layout see compile_fsdp/state/folder.py. Several machines need a file system that all of them share.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from compile_fsdp import state
from compile_fsdp.errors import StateError
from compile_fsdp.tools.train.config import ModelConfig, TrainError

KEPT = 2  # number of complete checkpoints to keep: the newest, and the one before it


@dataclass(frozen=True, slots=True)
class RunState:
    """The description of a run that is stored with a checkpoint."""

    step: int
    """Number of optimizer steps done."""
    model: ModelConfig
    stream: dict[str, int]
    """Settings that decide the order of the data, by name."""
    losses: tuple[float, ...]
    """(step,) mean loss of every step so far."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunState:
        raw = json.loads(text)
        return cls(raw["step"], ModelConfig(**raw["model"]), raw["stream"], tuple(raw["losses"]))


class Checkpointer:
    """Saves and resumes the run that lives in one folder. All ranks call each method together."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.is_first = rank == 0

    def find_latest(self) -> Path | None:
        """The newest complete step folder, or None if there is none yet.

        Raises:
            TrainError: the folder is not a checkpoint folder, or a part of it is missing.
        """
        try:
            return state.find_latest(self.folder)
        except StateError as error:
            raise TrainError(f"cannot resume with --checkpoint: {error}") from error

    def load(
        self, source: Path, config: ModelConfig, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> RunState:
        """Load `source` into the sharded `model` and its `optimizer`; any number of ranks may have saved it.

        Raises:
            TrainError: the checkpoint is of a model of another shape, or cannot be read.
        """
        try:
            run = RunState.from_json((source / "run.json").read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainError(f"cannot read {source / 'run.json'}: {error}") from error
        if changed := differences(asdict(run.model), asdict(config)):
            raise TrainError(
                f"the checkpoint {source} does not fit the model: {changed}; choose the model that it was "
                "saved from, or another folder with --checkpoint"
            )
        try:
            state.load(model, optimizer, source)
        except StateError as error:
            raise TrainError(str(error)) from error
        return run

    def save(self, run: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Save a checkpoint named by the step, make `latest` name it, and remove all but the last `KEPT` checkpoints.

        Raises:
            TrainError: files cannot be written.
        """
        try:
            target = state.save(model, optimizer, self.folder, run.step, files={"run.json": run.to_json()})
        except StateError as error:
            raise TrainError(str(error)) from error
        if self.is_first:
            self._remove_old(target)
        dist.barrier()
        return target

    def _remove_old(self, newest: Path) -> None:
        """Remove all step folders but the last `KEPT`; other files in the folder stay."""
        names = [path for path in self.folder.glob("step-" + "[0-9]" * 8) if path.name <= newest.name]
        for old in sorted(names)[:-KEPT]:
            shutil.rmtree(old)


def differences(saved: dict[str, int], now: dict[str, int]) -> str:
    """A text with every name whose value differs and both its values; empty if none differs."""
    names = [name for name in now if saved.get(name) != now[name]]
    return ", ".join(f"{name} was {saved.get(name)} and is {now[name]}" for name in names)
