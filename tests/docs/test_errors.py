"""docs/errors.md has one row per exception, with its cause and remedy."""

from __future__ import annotations

import inspect
import re

from compile_fsdp import errors
from helpers.pages.code_blocks import DOCS

ROWS = re.findall(r"^\| `(\w+(?:Error|Warning))` \| (.*) \| (.*) \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
EXCEPTIONS = {name: value for name, value in inspect.getmembers(errors, inspect.isclass) if not name.startswith("_")}


def test_every_exception_has_one_row() -> None:
    own = [name for name, value in EXCEPTIONS.items() if value.__module__ == errors.__name__]
    assert own
    rows = [name for name, _, _ in ROWS]
    assert set(own) <= set(rows)
    assert len(rows) == len(set(rows))


def test_row_has_cause_and_remedy_unless_the_class_is_never_raised() -> None:
    for name, cause, remedy in ROWS:
        assert cause
        if cause.startswith("never"):
            assert EXCEPTIONS[name].__subclasses__()
        else:
            assert remedy, name
