"""`make test-matrix`: run the tests with several releases of torch, and write docs/compatibility.md.

    python tests/helpers/releases/matrix.py 2.12.0 2.13.0 -- passes ops

The page is written after each release, and keeps the rows of releases that do not run this time.
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

HEAD = """# Compatibility

For users who choose a release of torch. `make test-matrix` writes this page from a run of the tests with each supported
release. Counts and names of tests are of the day of the run. A release outside of the range is refused at import. A
release that lacks a private name which the package uses is refused at import or before the first graph; the error names
it. `constraints.txt` has the release that `make test` runs with.

Releases differ:

* 2.11: without sharding, too, `aot_eager` rounds some gradients differently from eager code, by up to 2.2e-8 in float32
  (`tests/torch_compat/test_releases.py` shows this without compile_fsdp). Dynamo cuts a model with graph breaks into
  fewer pieces. DTensor's cache of operations grows in the first 600 steps of AdamW, also after eager FSDP2. Dynamo
  fails on `set_reshard_after_forward()` inside of a function under `torch.compile`. Two processes ended with
  `free(): invalid pointer`, which eighteen further runs did not repeat.
* 2.11 and 2.12: eager FSDP2 keeps a group of several modules unsharded into the backward if one of them does not run;
  compiled steps free it and gather it again, as eager steps do since 2.13. Guards and constants of a deleted model stay
  in memory.
* 2.15: eager FSDP2 reduces gradients in the parameters' dtype instead of the dtype in which they are computed, unless
  the policy has a `reduce_dtype`; so do compiled steps. In a microbatch that is not reduced yet, eager code also adds
  the gradients of a parameter's several uses in the parameters' dtype; compiled steps add them in the dtype of the
  computation. With a lower `param_dtype`, eager code does not round a gradient that an op computes in float32 (of
  RMSNorm's weight, for example); compiled steps round it to the `param_dtype`, as eager steps of earlier releases do.
  The [parity table](parity.md#refused) lists refused features of this release.

"""


@dataclass(frozen=True)
class Result:
    """Test results of one release.

    Attributes:
        torch: Version of the release.
        row: Its line of the table, with the counts of tests.
        failed: Names of the failed tests.
    """

    torch: str
    row: str
    failed: tuple[str, ...]


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
    """Parse a page written by `render`."""
    head, *sections = page.split("\n## Failures with torch ")
    failed = {section.split()[0]: tuple(re.findall(r"^\* `(.*)`$", section, re.MULTILINE)) for section in sections}
    rows = re.findall(r"^(\| (\d+\.\d+\.\d+) \|.*)$", head, re.MULTILINE)
    return [Result(torch, row, failed.get(torch, ())) for row, torch in rows]


def merge(earlier: list[Result], new: Result) -> list[Result]:
    """Merge results, sorted by release; the new result replaces its release's earlier result."""
    results = {result.torch: result for result in (*earlier, new)}
    return sorted(results.values(), key=lambda result: tuple(map(int, result.torch.split("."))))


def render(results: list[Result]) -> str:
    lines = ["| torch | when and where | tests | passed | failed | skipped | minutes |", "|" + " --- |" * 7]
    lines += [result.row for result in results]
    for result in results:
        if result.failed:
            lines += ["", f"## Failures with torch {result.torch}", "", *(f"* `{name}`" for name in result.failed)]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    for torch in given[:at]:
        result = run(torch, given[at + 1 :])
        PAGE.write_text(render(merge(parse(PAGE.read_text()), result)))
