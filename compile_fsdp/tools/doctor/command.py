"""`compile-fsdp doctor`: check an installation and print a remedy for each fault."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from compile_fsdp.tools.doctor.asked import NAME
from compile_fsdp.tools.doctor.checks import run_checks
from compile_fsdp.tools.doctor.rows import Row, State

DESCRIPTION = """\
Look for whatever keeps compile_fsdp from working here: versions, private names of torch, a C++ compiler, devices,
process groups, the compiler's cache. A table says what was found, with a remedy for each fault. The exit status is 1 if
there is a fault; warnings do not count.
"""

STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red", State.UNCHECKED: "dim"}


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = subcommands.add_parser(NAME, help="check the installation", description=DESCRIPTION)
    _add_options(parser)


def main(arguments: Sequence[str]) -> int:
    """Run this command alone, see [Note: A doctor for what does not import].

    Args:
        arguments: Arguments after `doctor`.
    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog=f"compile-fsdp {NAME}", description=DESCRIPTION)
    _add_options(parser)
    return run(parser.parse_args(arguments))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print all rows; return 1 if a row is a fault, else 0."""
    rows = run_checks()
    if args.json:
        print(as_json(rows))
    else:
        print_rows(rows)
    return int(any(row.state is State.FAULT for row in rows.values()))


def as_json(rows: Mapping[str, Row]) -> str:
    """Format the rows as a JSON list of objects with the fields `check`, `state`, `found` and `remedy`."""
    fields = [
        {"check": name, "state": row.state.value, "found": row.found, "remedy": row.remedy}
        for name, row in rows.items()
    ]
    return json.dumps(fields, indent=1)


def print_rows(rows: Mapping[str, Row]) -> None:
    """Print a table, or plain lines if rich is not installed, and the number of faults."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        for name, row in rows.items():
            print(f"{row.state.value:<10} {name:<15} {row.found}")
            if row.remedy:
                print(f"{'':<26} remedy: {row.remedy}")
        print(summary(rows))
        return
    table = Table(title="Installation", title_justify="left")
    for title in ("state", "check", "found, and remedy"):
        table.add_column(title, overflow="fold")
    for name, row in rows.items():
        remedy = f"\nremedy: {row.remedy}" if row.remedy else ""
        table.add_row(row.state.value, name, f"{row.found}{remedy}", style=STYLES[row.state])
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(summary(rows))


def summary(rows: Mapping[str, Row]) -> str:
    """Count faults and warnings, as in `1 fault, 2 warnings`."""
    states = [row.state for row in rows.values()]
    faults, warnings = states.count(State.FAULT), states.count(State.WARNING)
    return f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
