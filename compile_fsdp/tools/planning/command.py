"""The command `compile-fsdp plan`: parse its options and run it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.errors import EstimateError, PlanError
from compile_fsdp.passes import COSTS
from compile_fsdp.tools.planning.checkpointing import Checkpointing, Saved
from compile_fsdp.tools.planning.configs import PRESETS, build_model, read_config, token_batch
from compile_fsdp.tools.planning.estimates import Estimate, Optimizer, estimate
from compile_fsdp.tools.planning.schedule import Backend
from compile_fsdp.wrap import Plan, plan

if TYPE_CHECKING:
    from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
    from compile_fsdp.tools.planning.budgets import CompiledStep
    from compile_fsdp.tools.planning.report import Scaled

EXTRA_MODULES = ("rich", "matplotlib", "transformers")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DESCRIPTION = """\
Estimate memory and communication of a causal language model under FSDP2, from its configuration alone: per rank, as
formulas in the number of ranks, and as a table. Each layer is a group, and the rest is the root's.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the command line."""
    parser = subcommands.add_parser(
        "plan", help="estimate memory and communication per rank, without running", description=DESCRIPTION
    )
    parser.set_defaults(run=run)
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json of a transformers model")
    model.add_argument("--preset", choices=PRESETS, help="a model like Llama 3 of this size")

    running = parser.add_argument_group("how it is to run")
    running.add_argument(
        "--world", type=_numbers, default=(8, 64, 512, 4096), metavar="N,N", help="ranks (default 8,64,512,4096)"
    )
    running.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="T",
        help="tensor and sequence parallelism over T ranks, for each of which --world counts one (default 1)",
    )
    running.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences per rank (default 1)")
    running.add_argument("--seq-len", type=int, default=4096, metavar="S", help="tokens each (default 4096)")
    running.add_argument(
        "--optimizer",
        choices=[each.value for each in Optimizer],
        default=Optimizer.ADAMW.value,
        help="whose state is counted (default adamw)",
    )
    running.add_argument(
        "--param-dtype", choices=DTYPES, default="bfloat16", help="of gathered parameters (default bfloat16)"
    )
    running.add_argument(
        "--reduce-dtype", choices=DTYPES, default="float32", help="of reduced gradients (default float32)"
    )
    running.add_argument("--keep-unsharded", action="store_true", help="reshard_after_forward=False")
    running.add_argument(
        "--checkpoint",
        type=_checkpointing,
        metavar="HOW",
        help="activation checkpointing of layers: full, selective (saves attention and every second matrix product), "
        "matmuls (saves attention and all matrix products), or a number n (each n-th layer in full)",
    )
    running.add_argument(
        "--checkpoint-layers",
        dest="checkpoint",
        action="store_const",
        const=Checkpointing(),
        help="the same as --checkpoint full",
    )
    running.add_argument(
        "--compile-layers", action="store_true", help="each layer compiled: saves only what its backward reads"
    )
    running.add_argument(
        "--forward-prefetch", type=int, default=0, metavar="K", help="groups gathered ahead (default 0)"
    )
    running.add_argument(
        "--backward-prefetch", type=int, default=1, metavar="K", help="groups gathered ahead (default 1)"
    )
    running.add_argument(
        "--backend",
        choices=[each.value for each in Backend],
        default=Backend.NCCL.value,
        help="whose copies are counted (default nccl)",
    )

    compiled = parser.add_argument_group("compiled")
    compiled.add_argument(
        "--memory-budget", type=_size, metavar="SIZE", help="what the option memory_budget would decide: 24GiB, ..."
    )
    compiled.add_argument(
        "--network", type=Path, metavar="FILE.png", help="estimate and draw the step over the ranks, with HSDP, too"
    )
    compiled.add_argument("--costs", choices=COSTS, default="cuda", help="device whose costs count (default cuda)")
    compiled.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="that share a host (default 8)")
    compiled.add_argument(
        "--host-bandwidth", type=float, default=240.0, metavar="GB/S", help="into a host and out of it (default 240)"
    )

    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="write formulas and values")
    files.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory over the number of ranks")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {text!r}") from None


def _checkpointing(text: str) -> Checkpointing:
    try:
        return Checkpointing.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(each.value for each in Saved)} or a number of layers, got {text!r}"
        ) from None


def _size(text: str) -> int:
    number = text.rstrip("KMGTiB ")
    units = {"": 1, "B": 1, **{f"{prefix}iB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}}
    try:
        return int(float(number) * units[text[len(number) :].strip()])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"expected a size such as 24GiB or 4096, got {text!r}") from None


def require_extras() -> None:
    """Raise an EstimateError unless the packages that only this command needs are installed."""
    for module in EXTRA_MODULES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise EstimateError(
                f"compile-fsdp plan needs {error.name}; install it with: pip install 'compile-fsdp[plan]'"
            ) from error


def estimate_from(args: argparse.Namespace) -> Estimate:
    """The estimate that the options ask for."""
    with _naming_faults(args):
        return estimate(
            _plan_from(args),
            token_batch,
            near=(args.batch_size, args.seq_len),
            optimizer=Optimizer(args.optimizer),
            forward_prefetch=args.forward_prefetch,
            backward_prefetch=args.backward_prefetch,
            backend=Backend(args.backend),
        )


def compiled_step_from(args: argparse.Namespace) -> CompiledStep:
    """The compiled step that the options ask for."""
    from compile_fsdp.tools.planning.budgets import CompiledStep

    with _naming_faults(args):
        return CompiledStep(_plan_from(args), token_batch(args.batch_size, args.seq_len), max(args.world))


def _plan_from(args: argparse.Namespace) -> Plan:
    config = PRESETS[args.preset] if args.hf_config is None else read_config(args.hf_config)
    kwargs: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[args.param_dtype], reduce_dtype=DTYPES[args.reduce_dtype]
        )
    }
    if args.keep_unsharded:
        kwargs["reshard_after_forward"] = False
    checkpointing = args.checkpoint and replace(args.checkpoint, compiled=args.compile_layers)
    return plan(build_model(config, checkpointing, args.tp), fix_shared=True, **kwargs)


@contextmanager
def _naming_faults(args: argparse.Namespace) -> Iterator[None]:
    """Make an error that the model's own code raises one of its configuration."""
    try:
        yield
    except (EstimateError, PlanError):
        raise
    except Exception as error:  # the model's own code may raise anything on fake tensors
        message = str(error).partition("\n")[0]
        raise EstimateError(
            f"expected a model that runs on {args.batch_size} x {args.seq_len} fake tokens, got "
            f"{type(error).__name__}: {message}; try a smaller size"
        ) from error


def _check_parallelism(args: argparse.Namespace) -> None:
    # Lengths of 1/4, 2/4 and 3/4 are traced, too.
    if args.tp < 1 or (args.tp > 1 and args.seq_len % (4 * args.tp)):
        raise EstimateError(
            f"expected a length that 4 times the degree of tensor parallelism divides, got --seq-len {args.seq_len} "
            f"--tp {args.tp}; correct the options"
        )
    is_selective = args.checkpoint is not None and args.checkpoint.saved is not Saved.NOTHING
    if (args.tp > 1 or is_selective) and (args.memory_budget is not None or args.network is not None):
        raise EstimateError(
            "expected neither --tp nor a --checkpoint that saves outputs with --memory-budget and --network, which do "
            "not know them; ask for one of the two"
        )


def _scale(step: CompiledStep, found: Estimate, args: argparse.Namespace) -> dict[int, dict[str, Scaled]]:
    """The step on each number of ranks: sharded over all of them, and over a host's with replicas on the others."""
    from compile_fsdp.tools.planning.network import Network, step_time
    from compile_fsdp.tools.planning.report import Scaled

    costs, host = COSTS[args.costs], args.ranks_per_host
    network = Network(costs, host, args.host_bandwidth * 1e9)

    def scale(shards: int, replicas: int) -> Scaled:
        peak = found.at(shards, args.batch_size, args.seq_len)["peak"]
        return Scaled(step_time(step.at(shards, costs), network, replicas), peak)

    scaled = {}
    for ranks in args.world:
        scaled[ranks] = {"all ranks": scale(ranks, 1)}
        if host > 1 and ranks > host and ranks % host == 0:
            scaled[ranks]["a host (HSDP)"] = scale(host, ranks // host)
    return scaled


def run(args: argparse.Namespace) -> None:
    """Print the estimate, and write the files that the options ask for.

    Raises:
        EstimateError: the options, the configuration or the installation do not allow an estimate.
        PlanError: the model cannot be sharded layer by layer.
    """
    if args.ranks_per_host < 1 or not args.host_bandwidth > 0:
        raise EstimateError(
            f"expected at least 1 rank on a host and a bandwidth, got --ranks-per-host {args.ranks_per_host} "
            f"--host-bandwidth {args.host_bandwidth:g}; correct the options"
        )
    if min(args.world) < 2 or args.batch_size < 1 or args.seq_len < 1:
        raise EstimateError(
            f"expected at least 2 ranks and 1 token, got --world {','.join(map(str, args.world))} --batch-size "
            f"{args.batch_size} --seq-len {args.seq_len}; correct the options"
        )
    _check_parallelism(args)
    if args.compile_layers and args.checkpoint is None:
        raise EstimateError(
            "expected --checkpoint with --compile-layers, got none: what the partitioner chooses without it is not "
            "modelled; add --checkpoint selective, or use --memory-budget"
        )
    require_extras()
    from rich.console import Console

    from compile_fsdp.tools.planning import report

    found, sizes = estimate_from(args), (args.world, args.batch_size, args.seq_len)
    decisions: dict[int, BudgetDecision] = {}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    report.print_estimate(found, *sizes, console)
    if args.memory_budget is not None or args.network is not None:
        step = compiled_step_from(args)
        if args.memory_budget is not None:
            decisions = {ranks: step.decide(ranks, args.memory_budget, COSTS[args.costs]) for ranks in args.world}
            report.print_decisions(decisions, found, args.batch_size, args.seq_len, console)
        if args.network is not None:
            scaled = _scale(step, found, args)
            report.print_times(scaled, console)
            report.write_plot(report.draw_times(scaled), args.network)
            console.print(f"wrote {args.network}")
    if args.json is not None:
        report.write_json(found, *sizes, args.json, decisions)
        console.print(f"wrote {args.json}")
    if args.plot is not None:
        report.write_plot(report.draw(found, *sizes), args.plot)
        console.print(f"wrote {args.plot}")
