"""Runs of the command line: in this process, or on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from compile_fsdp.cli import main
from launcher import torchrun

TINY = ["--batch-size", "2", "--seq-len", "32", "--device", "cpu"]

Summary = dict[str, Any]
Train = Callable[..., Summary]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small file to train on."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 400)
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
def train_on_two_ranks(tmp_path: Path, text: Path) -> Train:
    """Trains the tiny preset on two gloo ranks under torchrun and returns summary.json."""

    def run(*args: object) -> Summary:
        output = tmp_path / "out"
        arguments = ["train", *TINY, "--data", text, "--output", output, *args]
        torchrun(tmp_path, "-m", "compile_fsdp", *arguments)
        summary: Summary = json.loads((output / "summary.json").read_text())
        return summary

    return run


@pytest.fixture
def run_on_two_ranks(tmp_path: Path) -> Callable[..., str]:
    """Runs a Python file on two ranks and returns what it prints."""
    return lambda *command: torchrun(tmp_path, *command)
