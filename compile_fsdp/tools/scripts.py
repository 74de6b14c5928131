"""Run a user's script for a command: under torchrun, or in a world whose collectives do nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from compile_fsdp.errors import ScriptError
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

    Raises:
        ScriptError: if the script does not exist, or ends with an error status.
        Exception: if the script raises an exception.
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
