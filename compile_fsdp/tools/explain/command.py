"""`compile-fsdp explain`: run a user's script, and report on the graphs that it has compiled."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from compile_fsdp.errors import ExplainError
from compile_fsdp.torch_compat.distributed import init_fake_process_group

DESCRIPTION = """\
Run a training script and write one HTML page about what compile_fsdp has compiled in it: a timeline, the memory of
unsharded parameters, the groups, the graphs pass by pass, graph breaks and recompiles. A few steps are enough. Alone,
the process is one rank of a world of any size whose collectives do nothing; under torchrun, the ranks are real, and
the first one writes.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    parser = subcommands.add_parser(
        "explain", help="report on what a script compiles, as an HTML page", description=DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    parser.add_argument(
        "--world", type=int, default=None, metavar="N", help="ranks of the world, without torchrun (default 8)"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="what the script gets as its arguments")


def run(args: argparse.Namespace) -> None:
    """Run the script, and write the page on the first rank.

    Raises:
        ExplainError: the script does not exist, initialises the process group a second time, or ends with an error
            status; or `--world` is not a valid number of ranks.
    """
    from compile_fsdp.tools.explain.capture import capture
    from compile_fsdp.tools.explain.report import make_report

    if not args.script.is_file():
        raise ExplainError(f"expected a Python file to run, got {args.script}, which does not exist")
    with _world(args.world) as (rank, world_size), capture() as captured:
        _run_script(args.script, args.args)
    if rank == 0:
        report = make_report(captured, args.script.name, world_size)
        report.save_html(args.out)
        print(f"wrote {args.out}")
        report.print()


@contextmanager
def _world(asked: int | None) -> Iterator[tuple[int, int]]:
    """Rank and number of ranks: those of torchrun, whose process group the script makes, or of a fake process group."""
    if dist.is_torchelastic_launched():
        if asked is not None:
            raise ExplainError(f"expected no --world under torchrun, which starts the ranks, got {asked}")
        yield int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return
    size = 8 if asked is None else asked
    if size < 1:
        raise ExplainError(f"expected --world to be at least 1, got {size}")
    init_fake_process_group(size)
    try:
        yield 0, size
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run_script(script: Path, arguments: list[str]) -> None:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ExplainError(f"expected {script} to end without an error, got exit status {end.code}") from end
    except ValueError as error:
        if "process group twice" not in str(error):
            raise
        raise ExplainError(
            f"expected {script} to use the process group that is there, got another init_process_group(); write "
            "`if not dist.is_initialized():` before it, or run the command under torchrun"
        ) from error
    finally:
        sys.argv, sys.path[:] = argv, path
