"""Collect the rows of the parity table while tests run, and write the table of docs/parity.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.parity.check import Outcome, more_collectives

_BACKENDS = ("aot_eager", "inductor")


@dataclass
class Row:
    """Figures of a row."""

    # Ranks, graphs, calls and sent bytes, of the backend that ran last.
    shared: tuple[str, str, str, str] = ("", "", "", "")
    # Largest relative difference to eager FSDP2, by inner backend.
    differences: dict[str, str] = field(default_factory=dict)
    # Peak of a compiled step over that of an eager step, by inner backend.
    peaks: dict[str, str] = field(default_factory=dict)

    def render(self, name: str) -> str:
        ranks, *counts = self.shared
        differences = [self.differences.get(backend, "") for backend in _BACKENDS]
        peaks = ", ".join(self.peaks[backend] for backend in _BACKENDS if backend in self.peaks)
        return f"| {' | '.join((name, ranks, *differences, *counts, peaks))} |\n"

    @classmethod
    def parse(cls, line: str) -> tuple[str, Row]:
        name, ranks, *differences, graphs, calls, sent, peak = (cell.strip() for cell in line.split("|")[1:-1])
        ran = {backend: text for backend, text in zip(_BACKENDS, differences, strict=True) if text}
        return name, cls((ranks, graphs, calls, sent), ran, dict(zip(ran, peak.split(", "), strict=True)))


@dataclass
class ParityTable:
    """Rows of the parity table, in the order of their tests."""

    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, row: str, inner_backend: str, world_size: int, outcomes: Sequence[Outcome]) -> None:
        """Add a row: the worst difference of all ranks, rank 0's remaining figures."""
        first = outcomes[0]
        compiled, eager = first.collectives
        later = first.compiled_after_first_step
        calls = str(len(compiled)) if len(compiled) == len(eager) else f"{len(compiled)} of {len(eager)}"
        if any(more_collectives(*outcome.collectives) for outcome in outcomes):
            calls += " (others)"
        found = self.rows.setdefault(row, Row())
        found.shared = (
            str(world_size),
            f"{len(first.directions)} + {later}" if later else str(len(first.directions)),
            calls,
            _ratio(sum(each.bytes for each in compiled), sum(each.bytes for each in eager)),
        )
        found.differences[inner_backend] = f"{max(outcome.worst for outcome in outcomes):.1e}".replace("0.0e+00", "0")
        found.peaks[inner_backend] = _ratio(*first.peak_bytes)

    def write(self, path: Path, torch_version: str) -> None:
        """Write the page's table; keep the figures of rows and backends that this run does not have."""
        head, ruler, rest = re.split(r"(\n[| -]+\n)", path.read_text(), maxsplit=1)
        table, tail = rest.split("\n\n", 1)
        rows = dict(map(Row.parse, table.splitlines()))
        for name, new in self.rows.items():
            old = rows.setdefault(name, Row())
            rows[name] = Row(new.shared, {**old.differences, **new.differences}, {**old.peaks, **new.peaks})
        lines = [row.render(name) for name, row in rows.items()]
        head = re.sub(r"\(torch [^,]+,", f"(torch {torch_version},", head)
        path.write_text(f"{head}{ruler}{''.join(lines)}\n{tail}")


def _ratio(compiled: float, eager: float) -> str:
    return "1" if compiled == eager else f"{compiled / eager:.2f}"
