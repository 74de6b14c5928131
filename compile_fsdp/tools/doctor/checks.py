"""All checks in the order of the table, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compile_fsdp.tools.doctor import caches, machine, software
from compile_fsdp.tools.doctor.rows import Row, State

Checks = Mapping[str, Callable[[], Row]]

# A fault in one of these prevents the import of the package, so no further check runs.
FIRST: Checks = {
    "package": software.check_package,
    "Python": software.check_python,
    "torch": software.check_torch,
    "compiler cache": caches.check_cache_folder,
    "private names": software.check_private_names,
}
THEN: Checks = {
    "Dynamo": software.check_dynamo,
    "C++ compiler": machine.check_compiler,
    "devices": machine.check_devices,
    "process groups": machine.check_process_groups,
    "fake group": machine.check_fake_group,
    "measured costs": caches.check_costs,
    "extras": software.check_extras,
}


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
