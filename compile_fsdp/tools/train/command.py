"""The command `compile-fsdp train`: parse its options and run it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from enum import Enum
from pathlib import Path
from typing import TypeVar

from compile_fsdp.tools.train.config import (
    DEFAULT_TIMEOUT_S,
    PRESETS,
    DeviceChoice,
    Mode,
    Precision,
    Preset,
    TrainError,
    TrainOptions,
)

EXTRA_MODULES = ("rich", "matplotlib")
DESCRIPTION = """\
Train a byte-level transformer with FSDP2 on real text, eagerly or compiled with compile_fsdp. Runs alone, or
on several ranks under torchrun: torchrun --nproc-per-node 2 -m compile_fsdp train
"""

E = TypeVar("E", bound=Enum)


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line."""
    parser = subcommands.add_parser(
        "train", help="train a byte-level transformer on real text", description=DESCRIPTION
    )
    parser.set_defaults(run=run)

    model = parser.add_argument_group("model")
    sizes = ", ".join(
        f"{name} {preset.model.parameter_count() / 1e6:.1f} M" for name, preset in PRESETS.items()
    )
    model.add_argument(
        "--preset", choices=PRESETS, default="tiny", help=f"size, in parameters: {sizes} (default tiny)"
    )
    model.add_argument(
        "--tie-embeddings", action="store_true", help="use the embedding table as output projection"
    )
    model.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence (default: the preset's)")

    running = parser.add_argument_group("how to run")
    add_choice(running, "--mode", Mode, Mode.COMPILE, "how forward and backward run")
    running.add_argument(
        "--inner-backend", metavar="NAME", help="torch.compile backend that compiles the graphs"
    )
    add_choice(running, "--device", DeviceChoice, DeviceChoice.AUTO, "where to train")
    add_choice(running, "--precision", Precision, Precision.FLOAT32, "of gathered parameters and activations")

    running.add_argument(
        "--timeout-s",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="X",
        help=f"seconds that a rank waits for the others, also to compile (default {DEFAULT_TIMEOUT_S:g})",
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data", type=Path, metavar="PATH", help="file or folder (default: Python's own library)"
    )
    training.add_argument("--steps", type=int, default=100, metavar="N", help="steps in all (default 100)")
    training.add_argument(
        "--batch-size", type=int, metavar="N", help="sequences per rank (default: the preset's)"
    )
    training.add_argument("--lr", type=float, metavar="X", help="learning rate (default: the preset's)")
    training.add_argument(
        "--warmup-steps", type=int, default=10, metavar="N", help="linear warmup (default 10)"
    )
    training.add_argument(
        "--grad-clip", type=float, default=1.0, metavar="X", help="largest norm (default 1.0)"
    )
    training.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of parameters and data (default 0)"
    )

    files = parser.add_argument_group("files")
    files.add_argument("--checkpoint", type=Path, metavar="DIR", help="resume from and save to this folder")
    files.add_argument(
        "--save-every", type=int, default=100, metavar="N", help="steps between saves (default 100)"
    )
    files.add_argument(
        "--output",
        type=Path,
        default=Path("train-out"),
        metavar="DIR",
        help="folder for loss.png and summary.json (default train-out)",
    )


def add_choice(group: argparse._ArgumentGroup, flag: str, kind: type[E], default: E, meaning: str) -> None:
    """Add an option whose values are the members of an enum."""
    values = [str(member.value) for member in kind]
    group.add_argument(
        flag, choices=values, default=default.value, help=f"{meaning} (default {default.value})"
    )


def parse_options(args: argparse.Namespace) -> TrainOptions:
    """The options of a run; options that were not given have the preset's values."""
    preset: Preset = PRESETS[args.preset]
    return TrainOptions(
        model=dataclasses.replace(preset.model, tie_embeddings=args.tie_embeddings),
        seq_len=preset.seq_len if args.seq_len is None else args.seq_len,
        batch_size=preset.batch_size if args.batch_size is None else args.batch_size,
        learning_rate=preset.learning_rate if args.lr is None else args.lr,
        output=args.output,
        mode=Mode(args.mode),
        inner_backend=args.inner_backend,
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        grad_clip=args.grad_clip,
        precision=Precision(args.precision),
        device=DeviceChoice(args.device),
        seed=args.seed,
        data=args.data,
        checkpoint=args.checkpoint,
        save_every=args.save_every,
        timeout_s=args.timeout_s,
    )


def require_extras() -> None:
    """Raise a TrainError unless the packages that only training needs are installed."""
    for module in EXTRA_MODULES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise TrainError(
                f"compile-fsdp train needs {error.name}; install it with: pip install 'compile-fsdp[train]'"
            ) from error


def run(args: argparse.Namespace) -> None:
    """Train, and report on the first rank.

    Raises:
        TrainError: the options, the data, the checkpoint or the installation do not allow the run.
    """
    require_extras()
    from rich.console import Console

    from compile_fsdp.tools.train.loop import train
    from compile_fsdp.tools.train.report import print_summary, write_outputs
    from compile_fsdp.tools.train.world import join_world

    options = parse_options(args)
    with join_world(options.device, options.timeout_s) as world:
        console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not world.is_first)
        summary = train(options, world, console)
        if world.is_first:
            print_summary(summary, console)
            for path in write_outputs(summary, options.output):
                console.print(f"wrote {path}")
