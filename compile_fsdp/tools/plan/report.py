"""Rows of a plan, as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compile_fsdp.passes.text import format_bytes, format_seconds
from compile_fsdp.tools.explain.report import Report
from compile_fsdp.tools.plan.trace import Settings

if TYPE_CHECKING:
    from rich.table import Table

# Bytes of optimizer state for each byte of shards.
OPTIMIZERS = {"sgd": 0, "sgd-momentum": 1, "adamw": 2}

NOTES = (
    "shards, optimizer: bytes that a rank holds between steps. step: most bytes above them in forward and backward. "
    "peak: all three. Times are estimates. Not planned: tensor parallelism, pipeline parallelism, float8."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a step on one rank. Seconds are estimates."""

    shard_bytes: int  # of the parameters' shards, padding included
    optimizer_bytes: int  # of the optimizer's state
    step_bytes: int  # most bytes above these two that forward and backward allocate at a time
    peak_bytes: int  # sum of the three
    step_s: float  # of forward and backward
    communication_s: float  # of all collectives, hidden behind compute or not
    exposed_s: float  # in which compute waits for communication


@dataclass(frozen=True, slots=True)
class Row:
    """Settings with their figures, or the reason why the step does not fit into its memory budget."""

    settings: Settings
    figures: Figures | None
    reason: str = ""


def read_figures(report: Report, optimizer: str) -> Figures:
    """Read the figures of a traced step; `optimizer` is a key of `OPTIMIZERS`."""
    sizes = report.shard_bytes, OPTIMIZERS[optimizer] * report.trained_bytes, report.allocated_bytes
    return Figures(*sizes, sum(sizes), sum(report.graph_s), report.communication_s, report.exposed_s)


def make_table(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("settings", "shards", "optimizer", "step", "peak", "time", "exposed"):
        table.add_column(name, no_wrap=name != "settings")
    for row in rows:
        cells = ["does not fit"]
        if (found := row.figures) is not None:
            sizes = found.shard_bytes, found.optimizer_bytes, found.step_bytes, found.peak_bytes
            cells = [*map(format_bytes, sizes), format_seconds(found.step_s), format_seconds(found.exposed_s)]
        table.add_row(str(row.settings), *cells)
    return table


def write_json(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
