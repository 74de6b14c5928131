"""Tables of docs/ agree with the code: errors, options, and the rows of the parity table."""

from __future__ import annotations

import dataclasses
import inspect
import re

from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp import Options, errors
from helpers.pages.code_blocks import DOCS

ERRORS = re.findall(r"^\| `(\w+(?:Error|Warning))` \| (.*) \| (.*) \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
EXCEPTIONS = {name: value for name, value in inspect.getmembers(errors, inspect.isclass) if not name.startswith("_")}


def test_every_exception_has_one_row() -> None:
    own = [name for name, value in EXCEPTIONS.items() if value.__module__ == errors.__name__]
    assert own
    rows = [name for name, _, _ in ERRORS]
    assert set(own) <= set(rows)
    assert len(rows) == len(set(rows))


def test_row_has_cause_and_remedy_unless_the_class_is_never_raised() -> None:
    for name, cause, remedy in ERRORS:
        assert cause
        if cause.startswith("never"):
            assert EXCEPTIONS[name].__subclasses__()
        else:
            assert remedy, name


def test_table_of_options_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (DOCS / "options.md").read_text(), flags=re.MULTILINE)
    documented = {name: eval(default, {"BackwardPrefetch": BackwardPrefetch}) for name, default in rows}
    assert documented == {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}


def test_every_row_of_the_parity_table_is_named_as_a_feature() -> None:
    """Except combined features."""
    combined = re.compile(r".+, (dp|hsdp|tp), (fp32|bf16), .+, .+")
    last_cells = re.findall(r"^\| [^*|]+ \|.*\| (`.+`) \|$", (DOCS / "features.md").read_text(), flags=re.MULTILINE)
    # Rows whose second cell is a number of ranks.
    rows = re.findall(r"^\| ([^|]+) \| \d+ \|", (DOCS / "parity.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in last_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named == {row for row in rows if not combined.fullmatch(row)}
