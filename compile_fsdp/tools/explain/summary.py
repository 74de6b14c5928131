"""Summary of a report as text for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.text import fill, format_bytes, format_seconds
from compile_fsdp.tools.explain.report_data import GroupRow, ReportData

MOST_CHOICES = 12  # number of choices that the terminal shows; the page shows all


def summary_lines(report: ReportData) -> Iterator[str]:
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


def _figures(report: ReportData) -> list[tuple[str, str]]:
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


def _groups(report: ReportData) -> Sequence[tuple[str, ...]]:
    rows = [("group", "unsharded", "gathers", "reductions", "windows removed", "prefetch", "kept")]
    for row in report.groups:
        counts = (str(row.gathers), str(row.reductions), f"{row.windows_removed} of {row.windows}")
        kept = "; ".join(dict.fromkeys(reason for _, reason in row.kept)) or "-"
        size = format_bytes(row.facts.unsharded_bytes)
        rows.append((row.facts.name, size, *counts, _prefetch(report, row), kept))
    return rows


def _choices(decision: BudgetDecision) -> list[tuple[str, str, str]]:
    """List the choices for a memory budget, with costs and savings."""
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


def _prefetch(report: ReportData, row: GroupRow) -> str:
    """Times from a group's gather to its use, as in `forward 3.1 ms, backward 0 us to 2 us`."""
    times: dict[str, list[float]] = {}
    for use in row.uses:
        if use.prefetch_events is not None:
            times.setdefault(report.graphs[use.graph].kind, []).append(use.prefetch_s)
    ranges = ((kind, map(format_seconds, sorted({min(each), max(each)}))) for kind, each in times.items())
    return ", ".join(f"{kind} {' to '.join(texts)}" for kind, texts in ranges) or "-"
