"""Report of `explain`, for the terminal, for an HTML page, or for a program."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from compile_fsdp.tools.explain.capture import Capture
from compile_fsdp.tools.explain.html import render_page
from compile_fsdp.tools.explain.names import GroupFacts
from compile_fsdp.tools.explain.report_data import GraphView, ReportData, make_rows
from compile_fsdp.tools.explain.summary import summary_lines
from compile_fsdp.tools.explain.timeline import place


class Report(ReportData):
    """How a step was compiled, and its estimated times; see `ReportData` for the attributes."""

    def save_html(self, path: str | Path) -> None:
        """Write the report as an HTML page that loads no file and needs no network."""
        Path(path).write_text(render_page(self), encoding="utf-8")

    def print(self) -> None:
        """Print a summary on the terminal."""
        print("\n".join(summary_lines(self)))


def make_report(captured: Capture, model: str, world_size: int) -> Report:
    """Make the report of a capture."""
    groups: dict[str, GroupFacts] = {}
    for graph in captured.graphs:
        for group in graph.groups:
            groups.setdefault(group.name, group)
    backwards = [i for i, graph in enumerate(captured.graphs) if graph.kind == "backward"]
    placed = place([graph.events for graph in captured.graphs], list(groups.values()), backwards)
    rows = make_rows(
        list(groups.values()),
        placed,
        sum((graph.windows for graph in captured.graphs), Counter()),
        sum((graph.windows_left for graph in captured.graphs), Counter()),
        [kept for graph in captured.graphs for kept in graph.kept],
    )
    notes = list(dict.fromkeys(captured.notes))
    if not captured.graphs:
        notes.append(
            "No graph was compiled by Inductor with the passes. Graphs of other inner backends, and models that ran "
            "eagerly, have nothing to show here."
        )
    elif not groups:
        notes.append("The compiled graphs have no sharded parameters.")
    return Report(
        model=model,
        world_size=world_size,
        torch_version=torch.__version__,
        graphs=tuple(GraphView(graph.kind, tuple(graph.stages)) for graph in captured.graphs),
        timeline=tuple(placed),
        groups=tuple(sorted(rows, key=lambda row: min((use.first[1] for use in row.uses), default=float("inf")))),
        breaks=tuple(captured.breaks),
        recompiles=tuple(captured.recompiles),
        notes=tuple(notes),
        decisions=tuple(captured.decisions),
    )
