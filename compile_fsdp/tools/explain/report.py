"""Report of `explain`, for the terminal, for an HTML page, or for a program."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.text import fill, format_bytes, format_seconds
from compile_fsdp.tools.explain.capture import Capture, GraphBreak, Recompile, Stage
from compile_fsdp.tools.explain.events import TRANSFERS, Kind
from compile_fsdp.tools.explain.groups import GroupRow, make_rows
from compile_fsdp.tools.explain.html import compare, render_page
from compile_fsdp.tools.explain.timeline import Placed, place

MOST_CHOICES = 12  # number of choices that the terminal shows; the page shows all


@dataclass(frozen=True, slots=True)
class GraphView:
    """A compiled graph after each pass."""

    kind: str  # "forward", "backward", or "evaluation" for a forward without a backward
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """How a step was compiled, and its estimated times. See `compile_fsdp.passes.Costs` for the estimates."""

    model: str  # name of the model's class, or of the script
    world_size: int
    torch_version: str
    graphs: tuple[GraphView, ...]  # in the order of their compilation
    timeline: tuple[Placed, ...]  # the events of all graphs, in the order of `graphs`
    groups: tuple[GroupRow, ...]  # in the order of their first use
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    notes: tuple[str, ...]  # further remarks, such as warnings
    decisions: tuple[BudgetDecision, ...]  # for a `memory_budget`, one for each forward graph; empty without a budget

    @property
    def graph_names(self) -> list[str]:
        """The kind of each graph, with a number if several graphs are of it."""
        kinds = [graph.kind for graph in self.graphs]
        numbered = (f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds))
        return [name if kinds.count(kind) > 1 else kind for name, kind in zip(numbered, kinds, strict=True)]

    @property
    def graph_s(self) -> list[float]:
        """Estimated seconds of each graph, by its events that hold compute up."""
        seconds = [0.0] * len(self.graphs)
        for each in self.timeline:
            if each.event.collective < 0 or each.event.kind is Kind.WAIT:
                seconds[each.graph] += each.exposed_s if each.event.kind is Kind.WAIT else each.event.seconds
        return seconds

    @property
    def exposed_s(self) -> float:
        """Estimated seconds in which compute waits for communication, in all graphs together."""
        return sum(each.exposed_s for each in self.timeline)

    @property
    def communication_s(self) -> float:
        """Estimated seconds of the collectives of all graphs together, hidden behind compute or not."""
        launches = (each.event for each in self.timeline if each.event.kind is not Kind.WAIT)
        return sum(event.seconds for event in launches if event.collective >= 0 and event.kind not in TRANSFERS)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of unsharded parameters alive at a time."""
        return max((each.event.alive_bytes for each in self.timeline), default=0)

    @property
    def eager_peak_bytes(self) -> int:
        """Most bytes of unsharded parameters that eager FSDP2 would hold, see `timeline.eager_bytes`."""
        return max((each.eager_bytes for each in self.timeline), default=0)

    @property
    def allocated_bytes(self) -> int:
        """Most bytes above the sharded state that are alive at a time, by the reads of the graphs."""
        events = (each.event for each in self.timeline)
        alive = (each.alive_bytes + each.activation_bytes + each.recomputed_bytes for each in events)
        return max(alive, default=0)

    @property
    def budget_bytes(self) -> int | None:
        """The smallest memory budget of the graphs in bytes; None without a budget."""
        return min((decision.budget for decision in self.decisions), default=None)

    @property
    def trained_bytes(self) -> int:
        """Bytes of this rank's shards that need a gradient."""
        return sum(row.facts.trained_bytes for row in self.groups)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parameters' shards on this rank."""
        return sum(row.facts.shard_bytes for row in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, ready for `json.dumps`."""
        seconds = ("graph_s", "exposed_s", "communication_s")
        sizes = ("peak_bytes", "eager_peak_bytes", "allocated_bytes", "budget_bytes", "shard_bytes")
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**plain, "figures": {name: getattr(self, name) for name in (*seconds, *sizes, "graph_names")}}

    def save_html(self, path: str | Path) -> None:
        """Write the report as an HTML page that loads no file and needs no network."""
        Path(path).write_text(render_page(self.model, page_data(self)), encoding="utf-8")

    def print(self) -> None:
        """Print a summary on the terminal."""
        print("\n".join(summary_lines(self)))


def make_report(captured: Capture, model: str, world_size: int) -> Report:
    groups = list({group.name: group for graph in captured.graphs for group in graph.groups}.values())
    backwards = [i for i, graph in enumerate(captured.graphs) if graph.kind == "backward"]
    placed = place([graph.events for graph in captured.graphs], groups, backwards)
    rows = make_rows(groups, placed, captured.graphs)
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
        decisions=tuple(report.decision for report in captured.reports if report.decision is not None),
    )


def page_data(report: Report) -> dict[str, Any]:
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


def summary_lines(report: Report) -> Iterator[str]:
    """Yield lines with figures, groups, graph breaks and recompiles."""
    yield f"{report.model} on {report.world_size} ranks"
    for name, text in _figures(report):
        yield fill(text, f"  {name:<19}  ", " " * 23)
    if report.groups:
        yield from ("", "Parameter groups", *_columns(_groups(report)))
    for decision in report.decisions:
        yield from ("", str(decision), *_columns(_choices(decision)))
    for found in report.breaks:
        yield fill(f"graph break at {found.place.filename}:{found.place.line}: {found.reason}", rest="    ")
        if found.place.source:
            yield f"    {found.place.source}"
    for again in report.recompiles:
        where = f"{again.place.filename}:{again.place.line}" + f", {again.times} times" * (again.times > 1)
        yield fill(f"recompiled {again.function}, called at {where}: {again.reason}", rest="    ")
    for note in report.notes:
        yield fill(f"note: {note}", rest="    ")


def _figures(report: Report) -> list[tuple[str, str]]:
    kinds = Counter(graph.kind for graph in report.graphs)
    times = map("{} {}".format, report.graph_names, map(format_seconds, report.graph_s))
    exposed = f"{format_seconds(report.communication_s)}, of which {format_seconds(report.exposed_s)} exposed"
    eager = f"(eager FSDP2, modelled: {format_bytes(report.eager_peak_bytes)})"
    rows = [
        ("graphs", ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "0"),
        ("graph breaks", str(len(report.breaks))),
        ("recompiles", str(sum(again.times for again in report.recompiles))),
        ("estimated", ", ".join(times) or "-"),
        ("communication", f"{exposed}, in these graphs together"),
        ("unsharded at a time", f"{format_bytes(report.peak_bytes)} {eager}"),
        ("allocated at a time", f"{format_bytes(report.allocated_bytes)}, activations and gradients included"),
        ("shards of this rank", format_bytes(report.shard_bytes)),
    ]
    if report.budget_bytes is not None:
        rows.append(("memory budget", format_bytes(report.budget_bytes)))
    return rows


def _groups(report: Report) -> Sequence[tuple[str, ...]]:
    rows = [("group", "unsharded", "gathers", "reductions", "windows removed", "prefetch", "kept")]
    for row in report.groups:
        counts = (str(row.gathers), str(row.reductions), f"{row.windows_removed} of {row.windows}")
        kept = "; ".join(dict.fromkeys(reason for _, reason in row.kept)) or "-"
        size = format_bytes(row.facts.unsharded_bytes)
        rows.append((row.facts.name, size, *counts, _prefetch(report, row), kept))
    return rows


def _choices(decision: BudgetDecision) -> list[tuple[str, str, str]]:
    choices = [(each.name, each.seconds, each.size) for each in decision.choices[:MOST_CHOICES]]
    if others := decision.choices[MOST_CHOICES:]:
        name = f"and {len(others)} more"
        choices.append((name, sum(each.seconds for each in others), sum(each.size for each in others)))
    rows = [(name, format_seconds(seconds), format_bytes(size)) for name, seconds, size in choices]
    return [("to fit", "costs", "saves"), *rows]


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(map(str.ljust, row, widths)).rstrip()


def _prefetch(report: Report, row: GroupRow) -> str:
    """Times from a group's gather to its use, as in `forward 3.1 ms, backward 0 us to 2 us`."""
    times: dict[str, list[float]] = {}
    for use in row.uses:
        if use.prefetch_events is not None:
            times.setdefault(report.graphs[use.graph].kind, []).append(use.prefetch_s)
    ranges = ((kind, map(format_seconds, sorted({min(each), max(each)}))) for kind, each in times.items())
    return ", ".join(f"{kind} {' to '.join(texts)}" for kind, texts in ranges) or "-"
