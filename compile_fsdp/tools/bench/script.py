"""`compile-fsdp bench --script`: compare eager and compiled steps of a user's script."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from compile_fsdp.errors import ScriptError
from compile_fsdp.tools import launch
from compile_fsdp.tools.bench.measure import Result
from compile_fsdp.tools.bench.turns import ScriptTurns, steps_needed
from compile_fsdp.tools.check.failures import run_reported
from compile_fsdp.tools.scripts import ended_by

USER_ERROR = 2  # exit status of the command for an error that it has already printed


def measure_script(script: Path, arguments: Sequence[str], rounds: int) -> tuple[dict[str, Result], int]:
    """Run a script until it ends or enough of its steps are measured. Collective.

    Returns the results of "eager" and "compile", and the number of measured rounds: at least 2, at most `rounds`.

    Raises:
        ScriptError: if the script raises an error, makes too few steps, compiles nothing, or recompiles too often; see
            also `run_reported`.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "400"  # collectives that the flight recorder keeps
    turns = ScriptTurns(rounds)
    with turns.begun(), ended_by(turns.count):
        run_reported(script, list(arguments))
    if dist.is_initialized():
        dist.destroy_process_group()
    if isinstance(turns.outcome, ScriptError):
        raise turns.outcome
    if turns.outcome is None:
        raise ScriptError(
            f"expected {script} to make about {steps_needed(2)} optimizer steps or more, got {turns.steps}; let it "
            "train longer"
        )
    return turns.outcome, turns.rounds


def on_own_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run this command again on new ranks of this host; return the exit status."""
    try:
        launch.run(ranks, _run_command, arguments)
    except launch.RankLost as lost:
        if lost.exit_code != USER_ERROR:
            raise
        return USER_ERROR
    return 0


def _run_command(rank: int, arguments: Sequence[str]) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    sys.argv = ["compile-fsdp", *arguments]
    try:
        runpy.run_module("compile_fsdp", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
