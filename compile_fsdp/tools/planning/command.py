"""The command `compile-fsdp plan`: parse its options and run it."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.errors import EstimateError, PlanError
from compile_fsdp.tools.planning.configs import PRESETS, build_model, read_config, token_batch
from compile_fsdp.tools.planning.estimates import Estimate, Optimizer, estimate
from compile_fsdp.tools.planning.schedule import Backend
from compile_fsdp.wrap import plan

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
    running.add_argument("--checkpoint-layers", action="store_true", help="activation checkpointing of each layer")
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

    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="write formulas and values")
    files.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory over the number of ranks")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {text!r}") from None


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
    config = PRESETS[args.preset] if args.hf_config is None else read_config(args.hf_config)
    kwargs: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[args.param_dtype], reduce_dtype=DTYPES[args.reduce_dtype]
        )
    }
    if args.keep_unsharded:
        kwargs["reshard_after_forward"] = False
    model = build_model(config, args.checkpoint_layers)
    try:
        return estimate(
            plan(model, fix_shared=True, **kwargs),
            token_batch,
            near=(args.batch_size, args.seq_len),
            optimizer=Optimizer(args.optimizer),
            forward_prefetch=args.forward_prefetch,
            backward_prefetch=args.backward_prefetch,
            backend=Backend(args.backend),
        )
    except (EstimateError, PlanError):
        raise
    except Exception as error:  # the model's own code may raise anything on fake tensors
        message = str(error).partition("\n")[0]
        raise EstimateError(
            f"expected a model that runs on {args.batch_size} x {args.seq_len} fake tokens, got "
            f"{type(error).__name__}: {message}; try a smaller size"
        ) from error


def run(args: argparse.Namespace) -> None:
    """Print the estimate, and write the files that the options ask for.

    Raises:
        EstimateError: the options, the configuration or the installation do not allow an estimate.
        PlanError: the model cannot be sharded layer by layer.
    """
    if min(args.world) < 2 or args.batch_size < 1 or args.seq_len < 1:
        raise EstimateError(
            f"expected at least 2 ranks and 1 token, got --world {','.join(map(str, args.world))} --batch-size "
            f"{args.batch_size} --seq-len {args.seq_len}; correct the options"
        )
    require_extras()
    from rich.console import Console

    from compile_fsdp.tools.planning import report

    found, sizes = estimate_from(args), (args.world, args.batch_size, args.seq_len)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    report.print_estimate(found, *sizes, console)
    if args.json is not None:
        report.write_json(found, *sizes, args.json)
        console.print(f"wrote {args.json}")
    if args.plot is not None:
        report.write_plot(report.draw(found, *sizes), args.plot)
        console.print(f"wrote {args.plot}")
