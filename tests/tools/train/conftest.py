"""Runs of the command line: in this process, or on two ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from compile_fsdp.cli import main
from compile_fsdp.tools.train.config import PRESETS, ModelConfig, Preset
from helpers.device.build import build
from helpers.ranks.forked import run_forked
from helpers.ranks.torchrun import torchrun

TINY = ["--batch-size", "2", "--seq-len", "32", "--device", "cpu"]
# Most of what a start on two ranks costs is tracing and compiling: two blocks show what four do.
TWO_BLOCKS = Preset(ModelConfig(dim=32, layers=2, heads=2, hidden=64), 32, 2, 3e-3)
SCRIPT = f"""\
import sys
from compile_fsdp.cli import main
from compile_fsdp.tools.train.config import PRESETS, ModelConfig, Preset

PRESETS["tiny"] = {TWO_BLOCKS!r}
sys.exit(main())
"""
# To go before the script: ranks of two machines, each of which has one emulated device.
ON_ONE_DEVICE_EACH = """\
import os
from helpers.device.install import install

install()
os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
"""
TEXT = "the quick brown fox jumps over the lazy dog; " * 400

Summary = dict[str, Any]
Train = Callable[..., Summary]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small file to train on."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def train(tmp_path: Path, text: Path) -> Iterator[Train]:
    """Trains the tiny preset eagerly on one rank, in this process, and returns summary.json."""

    def run(*args: object) -> Summary:
        output = tmp_path / "out"
        common = ["--mode", "eager", *TINY, "--data", text, "--output", output]
        assert main(["train", *map(str, (*common, *args))]) == 0
        summary: Summary = json.loads((output / "summary.json").read_text())
        return summary

    yield run
    assert not dist.is_initialized()


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tiny preset of this process the one of `train_on_two_ranks`."""
    monkeypatch.setitem(PRESETS, "tiny", TWO_BLOCKS)


@pytest.fixture
def train_on_two_ranks(tmp_path: Path, text: Path) -> Train:
    """Trains a model of two blocks on two gloo ranks and returns summary.json."""
    return _two_ranks(SCRIPT, tmp_path, text)


@pytest.fixture
def train_on_two_devices(tmp_path: Path, text: Path) -> Train:
    """The same, on whatever accelerator is there, and an emulated device is there for each rank."""
    build()
    train = _two_ranks(ON_ONE_DEVICE_EACH + SCRIPT, tmp_path, text)
    return lambda *args: train("--device", "auto", *args)


def _two_ranks(script: str, folder: Path, text: Path) -> Train:
    (folder / "train.py").write_text(script)

    def run(*args: object) -> Summary:
        output = folder / "out"
        arguments = ["train", *TINY, "--data", text, "--output", output, *args]
        run_forked(folder, "train.py", *arguments)
        summary: Summary = json.loads((output / "summary.json").read_text())
        return summary

    return run


@dataclass(frozen=True)
class EagerOnTwoRanks:
    """An eager run on two ranks, whole and stopped.

    Attributes:
        whole: summary.json of five steps.
        _stopped: The checkpoint of a run that has done two.
    """

    whole: Summary
    _stopped: Path

    def checkpoint(self, folder: Path) -> Path:
        """A copy of it, to go on from."""
        return Path(shutil.copytree(self._stopped, folder))


@pytest.fixture(scope="session")
def eager_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> EagerOnTwoRanks:
    """Run once for the tests that compare with it, or go on from it; on the data that `text` has."""
    folder = tmp_path_factory.mktemp("eager_on_two_ranks")
    (folder / "text.txt").write_text(TEXT)
    (folder / "train.py").write_text(SCRIPT)
    common = ["train.py", "train", *TINY, "--data", "text.txt", "--mode", "eager"]
    run_forked(folder, *common, "--steps", 5, "--output", "whole")
    run_forked(folder, *common, "--steps", 2, "--output", "stopped", "--checkpoint", "checkpoint")
    return EagerOnTwoRanks(json.loads((folder / "whole" / "summary.json").read_text()), folder / "checkpoint")


@pytest.fixture
def run_on_two_ranks(tmp_path: Path) -> Callable[..., str]:
    """Runs a Python file on two ranks and returns what it prints."""
    return lambda *command: torchrun(tmp_path, *command)
