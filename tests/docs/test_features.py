"""docs/features.md names every row of the parity table, except combined features."""

from __future__ import annotations

import re

from helpers.pages.code_blocks import DOCS


def test_every_row_of_the_parity_table_is_named() -> None:
    combined = re.compile(r".+, (dp|hsdp|tp), (fp32|bf16), .+, .+")
    last_cells = re.findall(r"^\| [^*|]+ \|.*\| (`.+`) \|$", (DOCS / "features.md").read_text(), flags=re.MULTILINE)
    # Rows whose second cell is a number of ranks.
    rows = re.findall(r"^\| ([^|]+) \| \d+ \|", (DOCS / "parity.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in last_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named == {row for row in rows if not combined.fullmatch(row)}
