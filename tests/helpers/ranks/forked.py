"""Run a Python file on forked ranks, like torchrun, without import time.

A rank that torchrun starts imports for five seconds; these ranks are forked from a server with all imports done.
Restarts and other features of torchrun itself are tested with `torchrun`.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NoReturn

from compile_fsdp.tools.launch import Ranks

TESTS = Path(__file__).parents[2]
COMMAND = TESTS.parent / "compile_fsdp" / "__main__.py"  # the command `compile-fsdp`
TIMEOUT_S = 600.0  # compiling takes minutes on a busy machine

_PRELOADED = [
    *("compile_fsdp.cli", "compile_fsdp.state", "compile_fsdp.wrap"),
    *("helpers.faults.killed_saves", "helpers.ranks.warm", "torch._inductor.compile_fx", "transformers"),
]


def forkserver() -> Any:
    """Return the multiprocessing context whose processes start with the imports done."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Python 3.11's fork server needs this to find the helpers.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ensure_running()
    finally:
        restore_path()
    return context


def restore_path() -> None:
    """Remove the tests' folder from PYTHONPATH, here or in the server."""
    _, _, others = os.environ.pop("PYTHONPATH").partition(os.pathsep)
    if others:
        os.environ["PYTHONPATH"] = others


def leave_to_rest() -> None:
    """Exclude all live objects from later garbage collections.

    Dynamo creates so many objects that repeated scans of the imported modules' objects take a sixth of its time.
    """
    gc.collect()
    gc.freeze()


def to_the_end(rank: int, function: Callable[..., None], *args: Any) -> NoReturn:
    """Call `function(rank, *args)` and end the process, as the end of a script does."""
    status = 0
    try:
        function(rank, *args)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)


@dataclass(frozen=True)
class ForkedRank:
    """One rank that runs a Python file."""

    ranks: Ranks  # all
    process: Any  # a `multiprocessing.Process`
    output_file: Path  # with its stdout and stderr

    def wait(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Return the exit status (negative for a signal) and the output; raise after a timeout."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.ranks.kill()
            raise AssertionError(f"not finished after {timeout_s:.0f} s:\n{self.output_file.read_text()}")
        return self.process.exitcode, self.output_file.read_text()


def start_ranks(folder: Path, command: Sequence[object]) -> list[ForkedRank]:
    """Start two ranks.

    Args:
        folder: Working directory; outside the repository, so that ranks import the installed package.
        command: A Python file and its arguments.
    """
    ranks = Ranks(2, forkserver())
    outputs = [folder / f"output_{time.monotonic_ns()}_{rank}.txt" for rank in range(2)]
    ranks.begin(to_the_end, _run, str(folder), [str(each) for each in command], [str(each) for each in outputs])
    return [ForkedRank(ranks, *each) for each in zip(ranks.processes, outputs, strict=True)]


def run_forked(folder: Path, *command: object) -> str:
    """Run a Python file with arguments on two ranks; return their output."""
    ranks = start_ranks(folder, command)
    try:
        results = [rank.wait() for rank in ranks]
    finally:
        ranks[0].ranks.kill()
    output = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0], output
    return output


def _run(rank: int, folder: str, command: list[str], output_files: list[str]) -> None:
    os.chdir(folder)
    output = os.open(output_files[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = command
    leave_to_rest()
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
