"""The command `compile-fsdp bench`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from compile_fsdp.errors import CommandError, ScriptError
from compile_fsdp.passes.text import fill
from compile_fsdp.reports import reports
from compile_fsdp.tools import launch
from compile_fsdp.tools.bench.llama import SIZES, Decoder
from compile_fsdp.tools.bench.measure import Result, describe_gain, format_table, measure, write_json
from compile_fsdp.tools.bench.modes import MODES, SIMPLE_FSDP
from compile_fsdp.tools.bench.turns import ScriptTurns, steps_needed
from compile_fsdp.tools.check.failures import run_reported
from compile_fsdp.tools.scripts import check_output, ended_by
from compile_fsdp.torch_compat.dynamo import recompile_limit

DESCRIPTION = """\
Measure a training step, forward and backward, of several ways to run FSDP2:
time, peak memory and collectives. The modes take turns in every round, so that
background load affects all of them. Runs on two new ranks, or on the ranks of
torchrun.

modes:
  eager           torch's FSDP2
  block           torch's FSDP2, with each block compiled before it is sharded
  compile         compile_fsdp
  compile_kept    compile_fsdp, with memory for all unsharded parameters
  bound           the model without sharding, compiled
  simple          SimpleFSDP of torchtitan, if it can be imported
  simple_bucket   SimpleFSDP with all of Inductor's collective bucketing
  simple_block    SimpleFSDP with buckets of a block's size

--script runs a training script of yours until enough of its steps are measured.
Eager and compiled steps take turns. The script really trains, so its own writes
happen. The command then prints the gain of compiling, and estimates further
gains.
"""

DEFAULT_MODES = ("eager", "block", "compile")
DEFAULT_MODELS = ("mid",)
USER_ERROR = 2  # exit status of the command for an error that it has already printed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = ",".join(DEFAULT_MODES)
    parser.add_argument("--modes", type=_names, default=DEFAULT_MODES, metavar="NAME,NAME", help=f"default {default}")
    parser.add_argument(
        "--model", type=_names, default=DEFAULT_MODELS, metavar="NAME,NAME", help=f"{', '.join(SIZES)} (default mid)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each mode, at least 2 (default 9)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="without torchrun (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a training script and its own arguments, as the last ones",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def run(args: argparse.Namespace) -> int:
    """Measure the workloads or the script, report on rank 0, and return the exit status.

    Each workload runs in new processes, because an earlier workload leaves compiled models, and profilers that gloo's
    threads may still report to.
    """
    if args.rounds < 2 or args.ranks < 1:
        raise CommandError(f"expected at least 2 rounds and 1 rank, got --rounds {args.rounds} --ranks {args.ranks}")
    check_output(args.json)
    _check(args)
    if not dist.is_torchelastic_launched() and 0 < (devices := torch.accelerator.device_count()) < args.ranks:
        raise CommandError(
            f"expected at most one rank per GPU of this host, got --ranks {args.ranks} for {devices}; pass --ranks "
            f"{devices}"
        )
    if args.script is not None:
        return _run_script(args)
    is_launched = dist.is_torchelastic_launched()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", args.ranks))
    tables: dict[str, dict[str, Result]] = {}
    for name in args.model:
        arguments = SIZES[name], args.modes, args.rounds
        tables[name] = _measure(rank, *arguments) if is_launched else launch.run(ranks, _measure, *arguments)[0]
        if rank == 0:
            print(format_table(name, tables[name]), flush=True)
    if rank == 0 and args.json is not None:
        write_json(tables, ranks, args.json)
    return 0


def _run_script(args: argparse.Namespace) -> int:
    script, arguments = Path(args.script[0]), args.script[1:]
    if "RANK" not in os.environ:
        options = [f"--rounds={args.rounds}", *([f"--json={args.json}"] if args.json else [])]
        return _on_own_ranks(["bench", *options, "--script", *args.script], args.ranks)
    if os.environ["RANK"] == "0":
        steps, fewest = steps_needed(args.rounds), steps_needed(2)
        needed = f"needs {fewest} optimizer steps or fewer, and measures {steps} at most"
        print(fill(f"really trains: the script's own writes happen; {needed}"), flush=True)
    table, rounds = _measure_script(script, arguments, args.rounds)
    if os.environ["RANK"] == "0":
        ranks = int(os.environ["WORLD_SIZE"])
        print(format_table(script.name, table))
        advice = next((report.advice for report in reversed(reports()) if report.groups), ())  # of the newest step
        print(*map(fill, [describe_gain(table, rounds, ranks), *(each.sentence for each in advice)]), sep="\n")
        if args.json is not None:
            write_json({script.name: table}, ranks, args.json)
    return 0


def _measure_script(script: Path, arguments: Sequence[str], rounds: int) -> tuple[dict[str, Result], int]:
    """Run a script until it ends or enough of its steps are measured. Collective.

    Returns the results of "eager" and "compile", and the number of measured rounds: at least 2, at most `rounds`.
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


def _on_own_ranks(arguments: Sequence[str], ranks: int) -> int:
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


def _check(args: argparse.Namespace) -> None:
    if args.script is not None:
        if not args.script:
            raise CommandError("expected a training script behind --script, got nothing")
        if args.modes != DEFAULT_MODES or args.model != DEFAULT_MODELS:
            raise CommandError("expected no --modes and no --model with --script, which trains its own model")
        return
    for option, asked, known in (("--modes", args.modes, MODES), ("--model", args.model, SIZES)):
        if unknown := sorted(set(asked).difference(known)):
            raise CommandError(f"expected {option} among {', '.join(known)}, got {', '.join(unknown)}")
    if "eager" not in args.modes:
        got = ",".join(args.modes)
        raise CommandError(f"expected eager among --modes, because each mode is compared with it, got {got}; add eager")
    if dist.is_torchelastic_launched() and len(args.model) > 1:
        raise CommandError(f"expected one --model under torchrun, got {', '.join(args.model)}; start it for each")
    if any(mode.startswith("simple") for mode in args.modes):
        try:
            __import__(SIMPLE_FSDP)
        except ModuleNotFoundError as error:
            raise CommandError(
                f"compile-fsdp bench needs {error.name} for these options; put a checkout of torchtitan on PYTHONPATH; "
                "install its imports: tyro, spmd_types"
            ) from error


def _measure(rank: int, workload: Decoder, modes: tuple[str, ...], rounds: int) -> dict[str, Result]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "400"  # collectives; each entry keeps the code that issued it alive
    device = launch.use_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    launch.join(device)
    try:
        # All modes compile the model's code objects, whose compilations Dynamo counts together.
        with recompile_limit(1000), torch.device(device.type):
            return measure(workload, modes, rounds)
    finally:
        dist.destroy_process_group()
