"""`compile-fsdp explain`: run a user's script and report on its compiled graphs."""

from __future__ import annotations

import argparse
from pathlib import Path

from compile_fsdp.tools.check.failures import run_reported
from compile_fsdp.tools.explain.capture import capture
from compile_fsdp.tools.explain.report import make_report
from compile_fsdp.tools.protect_files import protected_files
from compile_fsdp.tools.scripts import add_script, add_world, check_output, ended_after, world

DESCRIPTION = """\
Run a training script and write one HTML page about its compiled steps: a timeline, the memory of unsharded parameters,
the groups, the graphs pass by pass, graph breaks and recompiles. Without torchrun, the process is one rank of a world
of any size whose collectives do nothing; under torchrun, the ranks are real, and rank 0 writes. The script's own writes
do not reach its files.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    add_world(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> None:
    """Run the script, write the page and print a summary on rank 0."""
    check_output(args.out)
    protected = protected_files("explain", args.script)
    with world(args.world) as (rank, world_size), protected, capture() as captured, ended_after(args.steps):
        run_reported(args.script, args.args)
    if rank == 0:
        report = make_report(captured, args.script.name, world_size)
        report.save_html(args.out)
        print(f"wrote {args.out}")
        report.print()
