"""The HTML page of a report: one file that holds its style, code and data, and loads nothing.

[Note: Text from the model is data]
Names of modules and lines of code may contain any characters. The page holds them as JSON without a `<`, and its script
adds them to the document as text, never as markup. The page's content security policy forbids loading anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from importlib.resources import files
from typing import Any

from compile_fsdp.tools.explain.report_data import GraphView, ReportData

Edit = tuple[str, list[int]]  # " ", "-" or "+", and positions in the graph's table of lines


def render_page(report: ReportData) -> str:
    """Render the HTML page of a report."""
    here = files("compile_fsdp.tools.explain")
    page, style, code = ((here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    data = _embed(page_data(report))
    parts = {"TITLE": html.escape(report.model), "STYLE": style, "CODE": code, "DATA": data}
    pieces = page.split("@@")  # every second piece is the name of a part
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def page_data(report: ReportData) -> dict[str, Any]:
    """Make the page's data: the report, with each graph line stored once and each pass as edits."""
    data = report.to_dict()
    data["graphs"] = [_graph_data(graph) for graph in report.graphs]
    return data


def _graph_data(graph: GraphView) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    texts = [[numbers.setdefault(line, len(numbers)) for line in stage.lines] for stage in graph.stages]
    stages = []
    for i, stage in enumerate(graph.stages):
        edits = [(" ", texts[0])] if i == 0 else compare(texts[i - 1], texts[i])
        stages.append({"name": stage.name, "summary": stage.summary, "edits": edits})
    return {"kind": graph.kind, "lines": list(numbers), "stages": stages}


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


def _embed(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
