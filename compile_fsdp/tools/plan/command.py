"""The command `compile-fsdp plan`: parse its options, trace a step for each combination, and print the table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compile_fsdp.errors import EstimateError, MemoryBudgetError
from compile_fsdp.passes import COSTS
from compile_fsdp.passes.text import parse_bytes
from compile_fsdp.tools.plan.models import PRESETS, Build, Checkpoint, build_from_config, find_factory, read_config
from compile_fsdp.tools.plan.report import NOTES, OPTIMIZERS, Row, make_table, read_figures, write_json
from compile_fsdp.tools.plan.trace import DTYPES, Network, Settings, trace_step
from compile_fsdp.tools.scripts import check_output

DESCRIPTION = """\
Estimate memory and time of a model's compiled step on one rank, without a GPU and without running it. Options that take
a list are combined; each combination is traced and gets a line of the table. Tensor parallelism, pipeline parallelism
and float8 are not planned.
"""

UNPLANNED = {"tp": "tensor parallelism", "pp": "pipeline parallelism", "float8": "float8"}


def add_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--factory",
        metavar="FILE.py:NAME",
        help="function without arguments that returns a model and the keyword arguments of its forward",
    )
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json of a transformers model")
    model.add_argument("--preset", choices=PRESETS, help="a model like Llama 3 of this size")

    def add_list(name: str, parse: Callable[[str], Any], default: Any, text: str) -> None:
        parser.add_argument(name, type=_list(parse), default=(default,), metavar="A,B", help=text)

    add_list("--world", int, 8, "ranks (default 8)")
    add_list("--replicate", int, 1, "HSDP: replicas, each sharded over consecutive ranks (default 1)")
    add_list("--checkpoint", Checkpoint, Checkpoint.NONE, "checkpoint layers: none, full, selective, matmuls")
    add_list("--param-dtype", _dtype, "bfloat16", "of gathered parameters: bfloat16 (default), float32")
    add_list("--reduce-dtype", _dtype, "float32", "of reduced gradients: bfloat16, float32 (default)")
    add_list("--memory-budget", _size, None, "option memory_budget of the backend: none (default), 24GiB")
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences per rank (default 1)")
    parser.add_argument("--seq-len", type=int, default=4096, metavar="S", help="tokens per sequence (default 4096)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--costs", choices=COSTS, default="cuda", help="device whose built-in costs count")
    parser.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="ranks of a host (default 8)")
    parser.add_argument(
        "--host-bandwidth", type=float, default=240.0, metavar="GB/S", help="into a host and out of it (default 240)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    for name in UNPLANNED:
        parser.add_argument(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)


def _list(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse_all(text: str) -> tuple[Any, ...]:
        try:
            return tuple(map(parse, text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}, got {text!r}")
    return text


def _size(text: str) -> int | None:
    try:
        return None if text == "none" else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"expected none or {error}") from None


def run(args: argparse.Namespace) -> None:
    """Trace each combination of settings, print the table, and write the JSON file."""
    check_output(args.json)
    build, combinations = _find_build(args), list(_combine(args))
    network = Network(COSTS[args.costs], args.ranks_per_host, args.host_bandwidth * 1e9)
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise EstimateError(
            f"compile-fsdp plan needs {error.name}; install it with: pip install 'compile-fsdp[plan]'"
        ) from error
    console = Console(highlight=False, markup=False)
    rows = []
    for number, settings in enumerate(combinations, start=1):
        with console.status(f"tracing {number} of {len(combinations)}"):
            rows.append(_plan(build, settings, network, args.optimizer))
    console.print(make_table(rows))
    console.print(NOTES)
    if args.json is not None:
        write_json(rows, args.json)
        console.print(f"wrote {args.json}")


def _find_build(args: argparse.Namespace) -> Build:
    for name, text in UNPLANNED.items():
        if getattr(args, name) is not None:
            raise EstimateError(f"compile-fsdp plan does not plan {text}; leave out --{name}")
    if min(args.batch_size, args.seq_len, args.ranks_per_host) < 1 or not args.host_bandwidth > 0:
        raise EstimateError(
            f"expected positive numbers, got --batch-size {args.batch_size} --seq-len {args.seq_len} --ranks-per-host "
            f"{args.ranks_per_host} --host-bandwidth {args.host_bandwidth:g}"
        )
    if args.factory is not None:
        return find_factory(args.factory)
    config = PRESETS[args.preset] if args.hf_config is None else read_config(args.hf_config)
    return lambda: build_from_config(config, args.batch_size, args.seq_len)


def _combine(args: argparse.Namespace) -> Iterator[Settings]:
    lists = (args.world, args.replicate, args.checkpoint, args.param_dtype, args.reduce_dtype, args.memory_budget)
    for ranks, replicas, *others in itertools.product(*lists):
        if replicas < 1 or ranks % replicas or ranks // replicas < 2:
            raise EstimateError(
                f"expected replicas of at least 2 ranks each, got --world {ranks} and --replicate {replicas}"
            )
        yield Settings(ranks, replicas, *others)


def _plan(build: Build, settings: Settings, network: Network, optimizer: str) -> Row:
    try:
        return Row(settings, read_figures(trace_step(build, settings, network), optimizer))
    except MemoryBudgetError as error:
        return Row(settings, None, str(error).partition("\n")[0])
