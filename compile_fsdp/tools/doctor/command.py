"""`compile-fsdp doctor`: check an installation and print a remedy for each fault."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from compile_fsdp.tools.doctor import checks
from compile_fsdp.tools.doctor.asked import NAME
from compile_fsdp.tools.doctor.checks import Row, State

DESCRIPTION = """\
Check that compile_fsdp works on this host: versions, private names of torch, a C++ compiler, devices, process groups,
the compiler's cache. Print a table of the results, with a remedy for each fault. The exit status is 1 if
there is a fault; warnings do not count.
"""

Checks = Mapping[str, Callable[[], Row]]

# A fault in one of these prevents the import of the package, so no further check runs.
FIRST: Checks = {
    "package": checks.check_package,
    "Python": checks.check_python,
    "torch": checks.check_torch,
    "compiler cache": checks.check_cache_folder,
    "private names": checks.check_private_names,
}
THEN: Checks = {
    "Dynamo": checks.check_dynamo,
    "C++ compiler": checks.check_compiler,
    "devices": checks.check_devices,
    "process groups": checks.check_process_groups,
    "fake group": checks.check_fake_group,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, for programs")


def main(arguments: Sequence[str]) -> int:
    """Run this command with the arguments after `doctor`. See [Note: A doctor for a failing import]."""
    parser = argparse.ArgumentParser(prog=f"compile-fsdp {NAME}", description=DESCRIPTION)
    add_options(parser)
    return run(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Print all rows; return 1 if a row is a fault, else 0."""
    rows = run_checks()
    if args.json:
        found = [{"check": name, **asdict(row), "state": row.state.value} for name, row in rows.items()]
        print(json.dumps(found, indent=1))
    else:
        print_rows(rows)
    return int(any(row.state is State.FAULT for row in rows.values()))


def run_checks(first: Checks = FIRST, then: Checks = THEN) -> dict[str, Row]:
    """Run the checks, but none after a fault in `first`; return rows by check name."""
    rows: dict[str, Row] = {}
    for name, check in first.items():
        rows[name] = _run(check)
        if rows[name].state is State.FAULT:
            skipped = Row(State.UNCHECKED, f"see {name}")
            return {**dict.fromkeys((*first, *then), skipped), **rows}
    return {**rows, **{name: _run(check) for name, check in then.items()}}


def _run(check: Callable[[], Row]) -> Row:
    try:
        return check()
    except Exception as error:  # an unexpected error must not hide the remaining rows
        return Row(State.FAULT, f"{type(error).__name__}: {error}", "report this")


def print_rows(rows: Mapping[str, Row]) -> None:
    """Print a table, and the number of faults and warnings."""
    for name, row in rows.items():
        print(f"{row.state.value:<10} {name:<15} {row.found}")
        if row.remedy:
            print(textwrap.fill(f"remedy: {row.remedy}", 80, initial_indent=" " * 27, subsequent_indent=" " * 35))
    states = Counter(row.state for row in rows.values())
    faults, warnings = states[State.FAULT], states[State.WARNING]
    print(f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}")
