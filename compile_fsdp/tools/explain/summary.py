"""Print the summary of a report on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_fsdp.errors import ExplainError
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.tools.explain.groups import GroupRow, Use
from compile_fsdp.tools.explain.report import Report
from compile_fsdp.tools.explain.units import format_bytes, format_seconds

MOST_CHOICES = 12  # number of choices that the terminal shows; the page shows all

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_summary(report: Report, console: Console | None = None) -> None:
    """Print figures, groups, graph breaks and recompiles.

    Raises:
        ExplainError: if rich is not installed.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ExplainError(
            f"expected {error.name} for the summary on the terminal; install it with: pip install "
            "'compile-fsdp[explain]', or use save_html()"
        ) from error
    console = console or Console(highlight=False, markup=False)
    console.print(_figures(report))
    if report.groups:
        console.print(_groups(report))
    for decision in report.decisions:
        console.print(_choices(decision))
    for found in report.breaks:
        console.print(f"graph break at {found.place.filename}:{found.place.line}: {found.reason}", style="yellow")
        if found.place.source:
            console.print(f"    {found.place.source}")
    for again in report.recompiles:
        where = f"{again.place.filename}:{again.place.line}"
        console.print(f"recompiled {again.function}, called at {where}: {again.reason}", style="yellow")
    for note in report.notes:
        console.print(f"note: {note}", style="yellow")


def _figures(report: Report) -> Table:
    from rich.table import Table

    directions = [graph.direction for graph in report.graphs]
    table = Table(title=f"{report.model} on {report.world_size} ranks", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("graphs", f"{directions.count('forward')} forward, {directions.count('backward')} backward"),
        ("graph breaks", str(len(report.breaks))),
        ("recompiles", str(len(report.recompiles))),
        ("step, estimated", format_seconds(report.step_s)),
        (
            "communication",
            f"{format_seconds(report.communication_s)}, of which {format_seconds(report.exposed_s)} exposed",
        ),
        (
            "unsharded at a time",
            f"{format_bytes(report.peak_bytes)} (eager FSDP2, modelled: {format_bytes(report.eager_peak_bytes)})",
        ),
        ("allocated at a time", f"{format_bytes(report.allocated_bytes)}, activations and gradients included"),
        ("shards of this rank", format_bytes(report.shard_bytes)),
    ]
    if report.budget_bytes is not None:
        rows.append(("memory budget", format_bytes(report.budget_bytes)))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _groups(report: Report) -> Table:
    from rich.table import Table

    table = Table(title="Parameter groups", title_justify="left")
    for name in ("group", "unsharded", "gathers", "reductions", "windows removed", "kept", "prefetch"):
        table.add_column(name, overflow="fold")
    for row in report.groups:
        table.add_row(
            row.facts.name,
            format_bytes(row.facts.unsharded_bytes),
            str(row.gathers),
            str(row.reductions),
            f"{row.windows_removed} of {row.windows}",
            "; ".join(dict.fromkeys(reason for _, reason in row.kept)) or "-",
            prefetch_text(report, row),
        )
    return table


def _choices(decision: BudgetDecision) -> Table:
    """Make the table of the choices for a memory budget, with costs and savings."""
    from rich.table import Table

    table = Table(title=str(decision), title_justify="left")
    for name in ("to fit", "costs", "saves"):
        table.add_column(name, overflow="fold")
    for choice in decision.choices[:MOST_CHOICES]:
        table.add_row(choice.name, format_seconds(choice.seconds), format_bytes(choice.size))
    if others := decision.choices[MOST_CHOICES:]:
        seconds, size = sum(each.seconds for each in others), sum(each.size for each in others)
        table.add_row(f"and {len(others)} more", format_seconds(seconds), format_bytes(size))
    return table


def prefetch_text(report: Report, row: GroupRow) -> str:
    """Time from a group's gather to its use in each graph, as in `forward 3.1 ms, backward 0 us`."""
    gathered: list[Use] = [use for use in row.uses if use.prefetch_events is not None]
    times = (f"{report.graphs[use.graph].direction} {format_seconds(use.prefetch_s)}" for use in gathered)
    return ", ".join(times) or "-"
