"""`compile-fsdp check`: run a user's script for a few steps and report whether it compiles whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compile_fsdp.tools.scripts import add_script, add_world, world

DESCRIPTION = """\
Run a training script for two steps and say whether it compiles whole: which line breaks the graph and why, which
modules are in no graph, which parameters stay unsharded, which graphs were recompiled, and which settings are costly,
with a remedy for each. Without torchrun, the process is one rank of a world of any size whose collectives do nothing;
under torchrun, the ranks are real, and rank 0 writes. The script's own writes do not reach its files.
"""

EPILOG = """\
Exit status: 0 if the script compiles whole, 1 if it does not, 2 if the script itself failed or could not be run.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "check", help="say whether a script compiles whole, for CI", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=run)
    parser.add_argument("--strict", action="store_true", help="also exit with 1 for costly settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings")
    add_world(parser)
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script, report on rank 0, and return the exit status.

    Raises:
        ScriptError: if the script itself fails, or `--steps` is less than 1; see also `world` and `run_script`.
    """
    from compile_fsdp.tools.check.findings import Level
    from compile_fsdp.tools.check.watch import check_script
    from compile_fsdp.tools.protect_files import protected_files

    with world(args.world) as (rank, world_size), protected_files("check", args.script):
        report = check_script(args.script, args.args, args.steps, world_size)
    if rank == 0:
        print(report)
        if args.json is not None:
            args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    levels = {finding.level for finding in report.findings}
    return int(Level.BREAKS in levels or (args.strict and Level.COSTS in levels))
