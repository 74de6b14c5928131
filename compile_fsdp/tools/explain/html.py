"""The HTML page of a report: one file that holds its style, code and data, and loads nothing.

[Note: Text from the model is data]
Names of modules and lines of code may contain any characters. The page holds them as JSON without a `<`, and its script
adds them to the document as text, never as markup. The page's content security policy forbids loading anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from importlib.resources import files
from typing import Any

Edit = tuple[str, list[int]]  # " ", "-" or "+", and positions in the graph's table of lines


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Render the HTML page of a report from its title and data, see `page_data` in report.py."""
    here = files("compile_fsdp.tools.explain")
    page, style, code = ((here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    text = json.dumps(data, separators=(",", ":"))  # ASCII only
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {"TITLE": html.escape(title), "STYLE": style, "CODE": code, "DATA": text}
    pieces = page.split("@@")  # every second piece is the name of a part
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def compare(before: Sequence[int], after: Sequence[int]) -> list[Edit]:
    """Return the edits from `before` to `after`, in order; a replacement is a removal and an insertion."""
    edits: list[Edit] = []
    for kind, i, i_end, j, j_end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            edits.append((" ", list(before[i:i_end])))
        else:
            sides = ("-", before[i:i_end]), ("+", after[j:j_end])
            edits += [(sign, list(lines)) for sign, lines in sides if lines]
    return edits
