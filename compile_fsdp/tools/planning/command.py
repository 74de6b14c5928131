"""The command `compile-fsdp plan`: parse its options and run it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.errors import EstimateError, PlanError
from compile_fsdp.passes import COSTS
from compile_fsdp.tools.planning.configs import PRESETS, build_model, read_config, token_batch
from compile_fsdp.tools.planning.estimates import Estimate, Optimizer, estimate, largest
from compile_fsdp.tools.planning.options import DTYPES, add_options, check, shards
from compile_fsdp.tools.planning.pipelines import WHOLE, Place, Stage, distinct_places, stage_batch
from compile_fsdp.tools.planning.schedule import Backend
from compile_fsdp.wrap import Plan, plan

if TYPE_CHECKING:
    from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
    from compile_fsdp.tools.planning.budgets import CompiledStep
    from compile_fsdp.tools.planning.report import Scaled

EXTRA_MODULES = ("rich", "matplotlib", "transformers")
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
    add_options(parser)


def require_extras() -> None:
    """Raise an EstimateError unless the packages that only this command needs are installed."""
    for module in EXTRA_MODULES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise EstimateError(
                f"compile-fsdp plan needs {error.name}; install it with: pip install 'compile-fsdp[plan]'"
            ) from error


def estimates_from(args: argparse.Namespace) -> dict[int, Estimate]:
    """The estimates that the options ask for, by stage: of the first, the second and the last one of a pipeline."""
    places = distinct_places(args.pp, args.microbatches or args.pp)
    return {place.stage: _estimate_from(args, place) for place in places}


def _estimate_from(args: argparse.Namespace, place: Place) -> Estimate:
    with _naming_faults(args):
        planned, dim = _plan_from(args, place)

        def batch(sequences: int, length: int) -> dict[str, Tensor]:
            whole = token_batch(sequences, length)
            if place.stages == 1:
                return whole
            shape = (sequences, length // args.tp, dim)
            return stage_batch(whole, place, torch.empty(shape, dtype=DTYPES[args.param_dtype], device="meta"))

        return estimate(
            planned,
            batch,
            near=(args.batch_size, args.seq_len),
            optimizer=Optimizer(args.optimizer),
            forward_prefetch=args.forward_prefetch,
            backward_prefetch=args.backward_prefetch,
            backend=Backend(args.backend),
            replicas=args.replicate,
            place=place,
        )


def compiled_step_from(args: argparse.Namespace) -> CompiledStep:
    """The compiled step that the options ask for."""
    from compile_fsdp.tools.planning.budgets import CompiledStep

    with _naming_faults(args):
        return CompiledStep(_plan_from(args)[0], token_batch(args.batch_size, args.seq_len), max(args.world))


def _plan_from(args: argparse.Namespace, place: Place = WHOLE) -> tuple[Plan, int]:
    """The plan of the model, or of a stage, and the size of its hidden states."""
    config = PRESETS[args.preset] if args.hf_config is None else read_config(args.hf_config)
    kwargs: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[args.param_dtype], reduce_dtype=DTYPES[args.reduce_dtype]
        )
    }
    if args.keep_unsharded:
        kwargs["reshard_after_forward"] = False
    checkpointing = args.checkpoint and replace(args.checkpoint, compiled=args.compile_layers)
    model: Any = build_model(config, checkpointing, args.tp, args.float8)
    dim = model.config.get_text_config().hidden_size
    if place.stages == 1:
        return plan(model, fix_shared=True, **kwargs), dim
    stage = Stage(model, place)
    return plan(stage, stage.policy, **kwargs), dim


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
    check(args)
    require_extras()
    from rich.console import Console

    from compile_fsdp.tools.planning import report

    by_stage, sizes = estimates_from(args), (shards(args), args.batch_size, args.seq_len)
    found = largest(list(by_stage.values()))
    decisions: dict[int, BudgetDecision] = {}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    report.print_estimate(found, *sizes, console, args.replicate)
    if args.pp > 1:
        report.print_stages(by_stage, *sizes, console)
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
        report.write_json(found, *sizes, args.json, decisions, args.replicate, by_stage if args.pp > 1 else {})
        console.print(f"wrote {args.json}")
    if args.plot is not None:
        report.write_plot(report.draw(found, *sizes), args.plot)
        console.print(f"wrote {args.plot}")
