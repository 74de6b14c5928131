"""Run a user's script for a command, under torchrun or in a fake world, and end it after its first training steps."""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_fsdp.errors import CommandError, ScriptError
from compile_fsdp.tools.launch import fake_world


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add `--steps`, the script and the script's arguments to the end of a command line."""
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="end the script after N optimizer steps (default 2)"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def add_world(parser: argparse.ArgumentParser) -> None:
    """Add `--world`, the number of ranks if torchrun has not started the command."""
    parser.add_argument("--world", type=int, metavar="N", help="ranks of the world, without torchrun (default 8)")


def check_output(path: Path | None) -> None:
    """Refuse a file that rank 0 cannot write, before the ranks run anything; CommandError."""
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise CommandError(f"expected a file that can be written, got {path}; pass a path in a present folder")


@contextmanager
def world(asked: int | None) -> Iterator[tuple[int, int]]:
    """Yield the rank and the number of ranks for a script, given the value of `--world`.

    Under torchrun, the script makes the process group. Without torchrun, the block runs in a `fake_world`.
    """
    if dist.is_torchelastic_launched():
        if asked is not None:
            raise ScriptError(f"expected no --world under torchrun, which starts the ranks, got {asked}")
        yield int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return
    size = 8 if asked is None else asked
    with fake_world(size):
        yield 0, size


def run_script(script: Path, arguments: list[str]) -> dict[str, Any]:
    """Run a script with arguments as Python would; return its global names.

    In a `fake_world`, the script's `init_process_group()` keeps the fake process group.
    """
    if not script.is_file():
        raise ScriptError(f"expected a Python file to run, got {script}, which does not exist")
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__file__ = str(script)
    try:
        exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptError(f"expected {script} to end without an error, got exit status {end.code}") from end
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.modules["__main__"] = main
    return vars(module)


class _EnoughSteps(BaseException):
    """Ends the script; not an `Exception`, because the script's handlers may catch those."""


@dataclass(slots=True)
class Steps:
    """The steps that a script's optimizers have made."""

    limit: int  # number of steps of each optimizer after which the script ends
    by_optimizer: weakref.WeakKeyDictionary[Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)
    made: int = 0  # number of steps of the optimizer with the most steps
    # The exception that ended the script, whose traceback keeps the script's objects alive; else empty.
    end: list[BaseException] = field(default_factory=list)

    def count(self, optimizer: Optimizer) -> bool:
        """Count one step; return whether the script has made enough steps.

        A script may have several optimizers, for example one for each parameter, stepped in the backward, or one for
        each of two models. All optimizers must reach the limit, except that after `2 * limit + 1` steps of one
        optimizer, `count` no longer waits for optimizers that step rarely.
        """
        self.by_optimizer[optimizer] = self.by_optimizer.get(optimizer, 0) + 1
        counts = list(self.by_optimizer.values())
        self.made = max(counts)
        return min(counts) >= self.limit or self.made >= 2 * self.limit + 1


@contextmanager
def ended_by(count: Callable[[Optimizer], bool], end: list[BaseException] | None = None) -> Iterator[None]:
    """End the block without an error as soon as `count`, called after each step of any optimizer, returns True.

    `end` gets the exception that ends the block.
    """

    def receive(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count(optimizer):
            raise _EnoughSteps

    # Disabled, because Dynamo would trace the hook if a script compiles its optimizer's step.
    handle = register_optimizer_step_post_hook(torch.compiler.disable(receive))
    try:
        yield
    except _EnoughSteps as error:
        if end is not None:
            end.append(error)
    finally:
        handle.remove()


@contextmanager
def ended_after(limit: int) -> Iterator[Steps]:
    """End the block without an error after `limit` steps of each optimizer, see `Steps.count`."""
    if limit < 1:
        raise ScriptError(f"expected --steps to be at least 1, got {limit}")
    steps = Steps(limit)
    with ended_by(steps.count, steps.end):
        yield steps
