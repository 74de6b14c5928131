"""The options of `compile-fsdp plan`, and which of them go together."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from compile_fsdp.errors import EstimateError
from compile_fsdp.passes import COSTS
from compile_fsdp.tools.planning.checkpointing import Checkpointing, Saved
from compile_fsdp.tools.planning.configs import PRESETS
from compile_fsdp.tools.planning.estimates import Optimizer
from compile_fsdp.tools.planning.schedule import Backend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json of a transformers model")
    model.add_argument("--preset", choices=PRESETS, help="a model like Llama 3 of this size")

    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--world", type=_numbers, default=(8, 64, 512, 4096), metavar="N,N", help="ranks (default 8,64,512,4096)"
    )
    ranks.add_argument(
        "--replicate",
        type=int,
        default=1,
        metavar="R",
        help="HSDP: shard over a part of --world's ranks, and reduce gradients over R such parts (default 1)",
    )
    ranks.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="T",
        help="tensor and sequence parallelism over T ranks, for each of which --world counts one (default 1)",
    )

    ranks.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="P",
        help="pipeline of P stages, 1F1B, for each of which --world counts one rank; the largest stage's figures "
        "(default 1)",
    )
    ranks.add_argument(
        "--microbatches", type=int, metavar="M", help="of --batch-size sequences each, with --pp (default P)"
    )

    running = parser.add_argument_group("how it is to run")
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
    running.add_argument(
        "--float8", action="store_true", help="linear layers but the head multiply and are gathered in float8 (torchao)"
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


def shards(args: argparse.Namespace) -> list[int]:
    """The numbers of ranks to shard over: of each world, the part that is no replica."""
    return [ranks // args.replicate for ranks in args.world]


def check(args: argparse.Namespace) -> None:
    """Refuse options that no estimate is possible for, or that do not go together.

    Raises:
        EstimateError: with the options in question.
    """
    if args.ranks_per_host < 1 or not args.host_bandwidth > 0:
        raise EstimateError(
            f"expected at least 1 rank on a host and a bandwidth, got --ranks-per-host {args.ranks_per_host} "
            f"--host-bandwidth {args.host_bandwidth:g}; correct the options"
        )
    if min(args.world) < 2 or args.batch_size < 1 or args.seq_len < 1:
        raise EstimateError(
            f"expected at least 2 ranks and 1 token, got --world {_text(args.world)} --batch-size "
            f"{args.batch_size} --seq-len {args.seq_len}; correct the options"
        )
    _check_ranks(args)
    _check_pipeline(args)
    if args.compile_layers and args.checkpoint is None:
        raise EstimateError(
            "expected --checkpoint with --compile-layers, got none: what the partitioner chooses without it is not "
            "modelled; add --checkpoint selective, or use --memory-budget"
        )
    if args.memory_budget is not None or args.network is not None:
        _check_compiled(args)


def _check_ranks(args: argparse.Namespace) -> None:
    # Lengths of 1/4, 2/4 and 3/4 are traced, too.
    if args.tp < 1 or (args.tp > 1 and args.seq_len % (4 * args.tp)):
        raise EstimateError(
            f"expected a length that 4 times the degree of tensor parallelism divides, got --seq-len {args.seq_len} "
            f"--tp {args.tp}; correct the options"
        )
    if args.replicate < 1 or any(ranks % args.replicate or ranks < 2 * args.replicate for ranks in args.world):
        raise EstimateError(
            f"expected replicas that divide every world into parts of at least 2 ranks, got --replicate "
            f"{args.replicate} --world {_text(args.world)}; correct the options"
        )


def _check_pipeline(args: argparse.Namespace) -> None:
    is_given = args.microbatches is not None
    if args.pp < 1 or (is_given and (args.pp == 1 or args.microbatches < args.pp)):
        raise EstimateError(
            f"expected --microbatches with --pp, and at least as many as stages, got --pp {args.pp}"
            f"{f' --microbatches {args.microbatches}' if is_given else ''}; correct the options"
        )


def _check_compiled(args: argparse.Namespace) -> None:
    is_selective = args.checkpoint is not None and args.checkpoint.saved is not Saved.NOTHING
    unknown = {
        "--tp": args.tp > 1,
        "--replicate": args.replicate > 1,
        "--pp": args.pp > 1,
        "--float8": args.float8,
        "a --checkpoint that saves outputs": is_selective,
    }
    if given := [name for name, is_given in unknown.items() if is_given]:
        raise EstimateError(
            f"expected neither --memory-budget nor --network with {', '.join(given)}, which they do not know; ask for "
            "one of the two"
        )


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
