"""The command `compile-fsdp bench`: parse its options and run it."""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from compile_fsdp.reports import newest_advice
from compile_fsdp.tools.bench.measure import Result, measure
from compile_fsdp.tools.bench.modes import MODES, SIMPLE_FSDP
from compile_fsdp.tools.bench.report import Tables, describe_gain, format_table, write_json, write_plot
from compile_fsdp.tools.bench.script import measure_script, on_own_ranks
from compile_fsdp.tools.bench.workloads import SIZES, CausalLM, Workload
from compile_fsdp.tools.train.config import TrainError
from compile_fsdp.tools.train.world import backends_of
from compile_fsdp.torch_compat.dynamo import recompile_limit

DESCRIPTION = """\
Measure a training step, forward and backward, of several ways to run FSDP2: time, peak memory and collectives. The
modes take turns in every round, so that what else the machine does falls on all of them. Runs on two ranks of its own,
or on those that torchrun has started.

modes: eager is torch's FSDP2; block compiles each block before sharding it; whole compiles the sharded model, with its
graph breaks, and is measured apart; compile is this project, compile_kept with memory for all unsharded parameters,
compile_bundle with a bundle in the folder of the caches;
bound is one model without sharding, compiled. simple is SimpleFSDP from torchtitan, where that can be imported;
simple_bucket the same with all of Inductor's collective bucketing, simple_block with buckets of a block's size.

With --script, a training script of yours is run instead, until enough of its steps are measured: eager and compiled
ones take turns. It really trains, and the script's own writes happen. What compiling has gained is said in a sentence,
and what would gain more, as far as that is estimated.
"""

DEFAULT_MODES = ("eager", "block", "compile")
DEFAULT_MODELS = ("mid",)


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    parser = subcommands.add_parser(
        "bench",
        help="measure training steps of several modes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--modes", type=_names, default=DEFAULT_MODES, metavar="NAME,NAME", help="default: %(default)s"
    )
    parser.add_argument(
        "--model",
        type=_names,
        default=DEFAULT_MODELS,
        metavar="NAME,NAME",
        help=f"presets ({', '.join(SIZES)}) or config.json files of transformers (default mid)",
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences per rank, with config.json")
    parser.add_argument("--seq-len", type=int, default=128, metavar="S", help="tokens of each, with config.json")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each mode, at least 2 (default 9)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="without torchrun (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
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

    [Note: A process for each workload]
    Each workload runs in new processes, because an earlier workload leaves compiled models, and profilers that gloo's
    threads may still report to. The mode whole runs with eager in separate processes, because after its graph breaks
    Dynamo skips the code of module calls, and a later mode with fullgraph would compile only its blocks.

    Raises:
        TrainError: if the options or the installation do not allow the run.
        EstimateError: if a file is not the configuration of a model.
        ScriptError: see `measure_script`.
    """
    if args.script is not None:
        return _run_script(args)
    workloads = _check(args)
    tables = {}
    for name, workload in workloads.items():
        tables[name] = _on_present_ranks(workload, args) if dist.is_torchelastic_launched() else _spawn(workload, args)
        if os.environ.get("RANK", "0") == "0":
            print(format_table(name, tables[name]), flush=True)
    if os.environ.get("RANK", "0") == "0":
        _write(tables, int(os.environ.get("WORLD_SIZE", args.ranks)), args)
    return 0


def _write(tables: Tables, ranks: int, args: argparse.Namespace) -> None:
    if args.json is not None:
        write_json(tables, ranks, _device().type, args.json)
    if args.plot is not None:
        write_plot(tables, args.plot)


def _run_script(args: argparse.Namespace) -> int:
    if not args.script:
        raise TrainError("expected a training script behind --script, got nothing")
    if args.modes != DEFAULT_MODES or args.model != DEFAULT_MODELS:
        raise TrainError("expected no --modes and no --model with --script, which trains its own model")
    _check_numbers(args)
    script, arguments = Path(args.script[0]), args.script[1:]
    if "RANK" not in os.environ:
        options = [f"--rounds={args.rounds}", *_given("--json", args.json), *_given("--plot", args.plot)]
        return on_own_ranks(["bench", *options, "--script", *args.script], args.ranks)
    if os.environ["RANK"] == "0":
        print("really trains: the script's own writes happen", flush=True)
    table = measure_script(script, arguments, args.rounds)
    if os.environ["RANK"] == "0":
        ranks = int(os.environ["WORLD_SIZE"])
        print(format_table(script.name, table))
        print("\n".join([describe_gain(table, args.rounds, ranks), *(each.sentence for each in newest_advice())]))
        _write({script.name: table}, ranks, args)
    return 0


def _given(flag: str, path: Path | None) -> list[str]:
    return [] if path is None else [f"{flag}={path}"]


def _check(args: argparse.Namespace) -> dict[str, Workload]:
    if unknown := sorted(set(args.modes).difference(MODES)):
        raise TrainError(f"expected --modes among {', '.join(MODES)}, got {', '.join(unknown)}")
    if "eager" not in args.modes:
        got = ",".join(args.modes)
        raise TrainError(f"expected eager among --modes, because each mode is compared with it, got {got}; add eager")
    if dist.is_torchelastic_launched() and len(args.model) > 1:
        raise TrainError(f"expected one --model under torchrun, got {', '.join(args.model)}; start it for each")
    if dist.is_torchelastic_launched() and len(_apart(args.modes)) > 1:
        raise TrainError(f"expected whole with eager alone under torchrun, got {','.join(args.modes)}; start it apart")
    _check_numbers(args)
    if any(mode.startswith("simple") for mode in args.modes):
        _require(SIMPLE_FSDP, "put a checkout of torchtitan on PYTHONPATH; install what that imports: tyro, spmd_types")
    if any(name not in SIZES for name in args.model):
        _require("transformers", "install it with: pip install 'compile-fsdp[bench]'")
    return {name: _workload(name, args) for name in args.model}


def _check_numbers(args: argparse.Namespace) -> None:
    if args.rounds < 2 or args.ranks < 1:
        raise TrainError(f"expected at least 2 rounds and 1 rank, got --rounds {args.rounds} --ranks {args.ranks}")
    if args.plot is not None:
        _require("matplotlib", "install it with: pip install 'compile-fsdp[bench]'")


def _require(module: str, remedy: str) -> None:
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        raise TrainError(f"compile-fsdp bench needs {error.name} for these options; {remedy}") from error


def _workload(name: str, args: argparse.Namespace) -> Workload:
    if name in SIZES:
        return SIZES[name]
    path = Path(name)
    if not path.is_file():
        raise TrainError(f"expected --model among {', '.join(SIZES)} or the path of a config.json, got {name}")
    return CausalLM.read(path, args.batch_size, args.seq_len)


def _apart(modes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Split the modes into sets that need separate processes. See [Note: A process for each workload]."""
    others = tuple(mode for mode in modes if mode != "whole")
    return [modes] if others in (modes, ("eager",)) else [others, ("eager", "whole")]


def _spawn(workload: Workload, args: argparse.Namespace) -> dict[str, Result]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps the profiler from printing a line for every profile
    table: dict[str, Result] = {}
    for modes in _apart(args.modes):
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            spawn(_spawned, args=(workload, modes, args, f"{folder}/store", results), nprocs=args.ranks)
            table = pickle.loads(results.read_bytes()) | table  # written by rank 0, which this process started
    return {mode: table[mode] for mode in args.modes}


def _spawned(
    rank: int, workload: Workload, modes: tuple[str, ...], args: argparse.Namespace, store: str, results: Path
) -> None:
    file_store = dist.FileStore(store, args.ranks)  # type: ignore[attr-defined]
    table = _serve(workload, modes, args, rank, {"store": file_store, "rank": rank, "world_size": args.ranks})
    if rank == 0:
        results.write_bytes(pickle.dumps(table))


def _on_present_ranks(workload: Workload, args: argparse.Namespace) -> dict[str, Result]:
    return _serve(workload, args.modes, args, int(os.environ["LOCAL_RANK"]), {})


def _device() -> torch.device:
    """The accelerator that torch finds; the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _serve(
    workload: Workload,
    modes: tuple[str, ...],
    args: argparse.Namespace,
    local_rank: int,
    rendezvous: Mapping[str, Any],
) -> dict[str, Result]:
    device = _device()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "400"  # collectives; each entry keeps the code that issued it alive
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(backends_of(device), **rendezvous)
    try:
        # All modes compile the model's code objects, whose compilations Dynamo counts together.
        with recompile_limit(1000), device:
            return measure(workload, modes, args.rounds)
    finally:
        dist.destroy_process_group()
