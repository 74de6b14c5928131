"""The `compile-fsdp` command. Each subcommand's module has its `DESCRIPTION`, its `add_options` and its `run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

from compile_fsdp.tools.doctor import command as doctor_command
from compile_fsdp.tools.doctor.asked import NAME as DOCTOR


def build_parser() -> argparse.ArgumentParser:
    # Imported here because the doctor must run without them, see [Note: A doctor for a failing import].
    from compile_fsdp.tools import precompile
    from compile_fsdp.tools.bench import command as bench_command
    from compile_fsdp.tools.calibrate import command as calibrate_command
    from compile_fsdp.tools.check import command as check_command
    from compile_fsdp.tools.explain import command as explain_command
    from compile_fsdp.tools.plan import command as plan_command

    # No abbreviated options, because they could be options of the script.
    parser = argparse.ArgumentParser(prog="compile-fsdp", description="FSDP2 under torch.compile.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('compile-fsdp')}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands: dict[str, tuple[ModuleType, str]] = {
        "plan": (plan_command, "estimate memory and time per rank, without running"),
        "check": (check_command, "say whether a script compiles whole, for CI"),
        "explain": (explain_command, "report on the compiled steps of a script, as an HTML page"),
        "precompile": (precompile, "make the bundles of a job before it starts"),
        "bench": (bench_command, "measure training steps of several modes"),
        "calibrate": (calibrate_command, "measure the costs by which the passes decide"),
        DOCTOR: (doctor_command, "check the installation"),
    }
    for name, (command, summary) in commands.items():
        own = subcommands.add_parser(name, help=summary, description=command.DESCRIPTION, allow_abbrev=False)
        own.set_defaults(run=command.run)
        command.add_options(own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the subcommand's exit status, or 2 for a user error."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [DOCTOR]:
        return doctor_command.main(arguments[1:])
    from compile_fsdp import errors

    args = build_parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except (
        errors.CommandError,
        errors.EstimateError,
        errors.ExplainError,
        errors.PlanError,
        errors.ScriptError,
        errors.UnknownOptionError,
    ) as error:
        where = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        message = str(error).partition("\n")[0]  # Dynamo appends advice on Dynamo's log settings
        print(f"compile-fsdp: error{where}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compile-fsdp: interrupted", file=sys.stderr)
        return 130
