"""`make test-matrix`: run the tests with several releases of torch, and write the table of docs/compatibility.md.

    python tests/helpers/releases/matrix.py 2.12.0 2.13.0 -- passes ops

The table is written after each release, and keeps the rows of releases that do not run this time.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "compatibility.md"


@dataclass(frozen=True)
class Result:
    """Test results of one release."""

    torch: str  # the release
    row: str  # its line of the table, with the counts of tests
    failed: tuple[str, ...]  # names of tests


def run(torch: str, arguments: list[str]) -> Result:
    """Test with one release, in a virtual environment kept for the next run."""
    venv = ROOT / f".venv-torch-{torch}"
    venv.mkdir(exist_ok=True)
    constraints, log = venv / "constraints.txt", venv / "results.xml"
    pinned = re.sub(r"^torch==.*$", f"torch=={torch}", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    if not constraints.exists() or constraints.read_text() != pinned:
        constraints.write_text(pinned)
    subprocess.run(["make", "setup", f"VENV={venv.name}", f"CONSTRAINTS={constraints}"], cwd=ROOT, check=True)
    log.unlink(missing_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    options = shlex.split(environment.pop("PYTEST_ADDOPTS", ""))  # not for pytest runs that tests start
    command = [str(venv / "bin" / "pytest"), "-p", "no:cacheprovider", f"--junitxml={log}", *options, *arguments]
    subprocess.run(command, cwd=ROOT / "tests", env=environment, check=False)
    return read(log, torch, " ".join(arguments) or "all of `make test`")


def read(log: Path, torch: str, tests: str) -> Result:
    """Read the file that pytest writes with `--junitxml`."""
    suite = ElementTree.parse(log).getroot().find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})
    passed = len(cases) - len(failed) - len(skipped)
    minutes = float(suite.get("time", 0)) / 60
    today = datetime.datetime.now(datetime.timezone.utc).date()
    where = f"{today}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    counts = f"{passed} | {len(failed)} | {len(skipped)}"
    return Result(torch, f"| {torch} | {where} | {tests} | {counts} | {minutes:.0f} |", tuple(names))


def parse(page: str) -> list[Result]:
    """Parse what `render` has written."""
    head, *sections = page.split("\n## Failures with torch ")
    failed = {section.split()[0]: tuple(re.findall(r"^\* `(.*)`$", section, re.MULTILINE)) for section in sections}
    rows = re.findall(r"^(\| (\d+\.\d+\.\d+) \|.*)$", head, re.MULTILINE)
    return [Result(torch, row, failed.get(torch, ())) for row, torch in rows]


def merge(earlier: list[Result], new: Result) -> list[Result]:
    """Merge results, sorted by release; the new result replaces its release's earlier result."""
    results = {result.torch: result for result in (*earlier, new)}
    return sorted(results.values(), key=lambda result: tuple(map(int, result.torch.split("."))))


def render(results: list[Result]) -> str:
    """Write the table, and the failures of each release."""
    lines = ["| torch | when and where | tests | passed | failed | skipped | minutes |", "|" + " --- |" * 7]
    lines += [result.row for result in results]
    for result in results:
        if result.failed:
            lines += ["", f"## Failures with torch {result.torch}", "", *(f"* `{name}`" for name in result.failed)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    for torch in given[:at]:
        result = run(torch, given[at + 1 :])
        head, rule, table = PAGE.read_text().partition("| torch |")
        PAGE.write_text(head + render(merge(parse(rule + table), result)))
