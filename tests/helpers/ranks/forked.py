"""Run a Python file on ranks of its own, as torchrun does, in processes that have imported everything already.

A rank that torchrun starts imports for five seconds; these are forked from a server that has done so. What torchrun
itself does, restarts above all, is tested with `torchrun`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # compiling takes minutes on a machine that is busy with other things

_PRELOADED = [
    "compile_fsdp.cli",
    "compile_fsdp.state",
    "compile_fsdp.tools.train.loop",
    "compile_fsdp.wrap",
    "helpers.faults.killed_saves",
    "helpers.ranks.warm",
    "torch._inductor.compile_fx",
    "transformers",
]


def forkserver() -> Any:
    """The multiprocessing context in which processes start with the imports done."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _on_the_path(TESTS):
        ensure_running()
    return context


@contextlib.contextmanager
def _on_the_path(folder: Path) -> Iterator[None]:
    """A new server finds the helpers by a variable: multiprocessing gives it no other path. (Python 3.11)"""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        yield
    finally:
        restore_path()


def restore_path() -> None:
    """Undo what the path got, here or in the server."""
    _, _, others = os.environ.pop("PYTHONPATH").partition(os.pathsep)
    if others:
        os.environ["PYTHONPATH"] = others


def leave_to_rest() -> None:
    """Let no later collection of garbage look at what is alive now.

    Dynamo makes so many objects that looking at those of everything imported, again and again, is a sixth of the time
    that it takes.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class ForkedRank:
    """One rank that runs a Python file.

    Attributes:
        process: Its process, a `multiprocessing.Process`.
        output_file: What it prints.
    """

    process: Any
    output_file: Path

    def wait(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Its exit status (negative for a signal) and what it has printed. It is killed if it takes longer."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"not finished after {timeout_s:.0f} s:\n{self.output_file.read_text()}")
        return self.process.exitcode, self.output_file.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start_ranks(folder: Path, command: Sequence[object]) -> list[ForkedRank]:
    """Start two ranks.

    Args:
        folder: Where to run them; not the repository, so that its folders do not stand in for the installed package.
        command: A Python file and its arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        environment = {**place, **elastic, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output_file = folder / f"output_{time.monotonic_ns()}_{rank}.txt"
        arguments = (str(folder), [str(each) for each in command], environment, str(output_file))
        process = forkserver().Process(target=_run, args=arguments, daemon=False)
        process.start()
        ranks.append(ForkedRank(process, output_file))
    return ranks


def run_forked(folder: Path, *command: object) -> str:
    """Run a Python file with its arguments on two ranks and return what they print."""
    ranks = start_ranks(folder, command)
    try:
        results = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    output = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0], output
    return output


def _run(folder: str, command: list[str], environment: Mapping[str, str], output_file: str) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = command
    leave_to_rest()
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
