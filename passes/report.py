"""What a pass did to a graph, and why it left windows alone."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

MIB = 2**20

# Most parameters named per reason in the log line; the report itself has all of them.
_NAMES_PER_REASON = 3


# The parameter FQN of a placeholder, for reports.
Names = Callable[[fx.Node], str]


def node_name(node: fx.Node) -> str:
    return node.name


class Kept(enum.Enum):
    """Why a window stays in the graph. A kept window costs its copy and its memory, and is right as it is."""

    OPEN_AT_START = "open at start"
    OPEN_AT_RETURN = "open at return"
    NOT_FULL = "resized to less than the full size"
    REFILLED = "resized again while filled"
    DOUBLE_FREE = "freed twice"
    NO_COPY = "not filled by a copy"
    TWO_COPIES = "filled by several copies"
    COPY_OUTSIDE = "copied into while free"
    COPY_CONVERTS = "copy converts dtype or device"
    COPY_BROADCASTS = "copy broadcasts"
    COPY_RESTRIDES = "copy changes strides"
    READ_BEFORE_COPY = "read before its copy"
    READ_OUTSIDE = "read outside any window"
    READ_BY_STORAGE = "read through its storage"
    MUTATED = "mutated in the window"
    VALUE_MUTATED = "gathered value mutated in the window"
    CHAINED = "fills another parameter"
    VALUE_RESIZED = "gathered value is resized itself"
    VIEW_OUTLIVES = "a view outlives the window"
    VIEW_ESCAPES = "a view is returned"
    SHARED_STORAGE = "may share its storage with another input"
    RESULT_USED = "the result of one of its ops is used"
    UNKNOWN_LAYOUT = "layout unknown"


class Unmoved(enum.Enum):
    """Why `legalize_windows` left a parameter's reads and frees where they were."""

    NO_COPY = "read, but not filled by a copy"
    MUTATED = "mutated outside its fills"
    FILL_DEPENDS_ON_READ = "a fill depends on a read"
    AUTOCAST = "read would cross an autocast switch"


@dataclass(frozen=True, slots=True)
class WindowReport:
    """The result of one pass on one graph, the subgraphs of its higher-order ops included.

    Attributes:
        name: The pass.
        windows_removed: Complete windows taken out of the graph.
        copies_removed: `fsdp.copy_` ops taken out.
        resizes_removed: `inductor.resize_storage_bytes_` ops taken out.
        bytes_removed: Bytes those windows allocated. A symbolic size counts with its hint, or 0 without one.
        kept: (parameter FQN, reason) of each window left alone, parameters in graph order.
        nodes_before: Nodes of the graph that the pass got.
        nodes_after: Nodes of the graph it left.
        seconds: Time in the pass, without linting and logging. The pipeline measures it.
    """

    name: str
    windows_removed: int
    copies_removed: int
    resizes_removed: int
    bytes_removed: int
    kept: tuple[tuple[str, Kept], ...]
    nodes_before: int
    nodes_after: int
    seconds: float = 0.0

    def __str__(self) -> str:
        windows = self.windows_removed + len(self.kept)
        line = f"{self.name}: {self.windows_removed} of {windows} windows removed, {format_mib(self.bytes_removed)}"
        return line + _describe_kept(self.kept)


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The result of a pass that only counts what it did.

    Attributes:
        name: The pass.
        nodes_before: Nodes of the graph that the pass got.
        nodes_after: Nodes of the graph it left.
        counts: (what, how often), as the pass's file states it; names that begin with "bytes" count bytes.
        seconds: Time in the pass, without linting and logging. The pipeline measures it.
    """

    name: str
    nodes_before: int
    nodes_after: int
    counts: tuple[tuple[str, int], ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = (
            f"{format_mib(count)} {what.removeprefix('bytes_')}" if what.startswith("bytes_") else f"{count} {what}"
            for what, count in self.counts
        )
        return f"{self.name}: " + ", ".join(counts).replace("_", " ")


Report = WindowReport | PassCounts


def to_json(reports: Iterable[Report]) -> str:
    rows = []
    for report in reports:
        row = asdict(report)
        if isinstance(report, WindowReport):
            row["kept"] = [{"parameter": name, "reason": reason.value} for name, reason in report.kept]
        rows.append(row)
    return json.dumps(rows)


def from_json(text: str) -> tuple[Report, ...]:
    """The reports that `to_json` wrote."""
    return tuple(_from_row(row) for row in json.loads(text))


def _from_row(row: dict[str, Any]) -> Report:
    if "counts" in row:
        counts = tuple((what, count) for what, count in row.pop("counts"))
        return PassCounts(**row, counts=counts)
    kept = tuple((each["parameter"], Kept(each["reason"])) for each in row.pop("kept"))
    return WindowReport(**row, kept=kept)


@dataclass(frozen=True, slots=True)
class LegalizeReport:
    """The result of `legalize_windows` on one graph.

    Attributes:
        nodes_sunk: Nodes moved behind the fill that they, or what they depend on, read.
        frees_delayed: `resize(0)` ops moved behind the last read of their parameter.
        unmoved: (parameter FQN, reason) of each parameter with an illegal read that could not be mended.
    """

    nodes_sunk: int
    frees_delayed: int
    unmoved: tuple[tuple[str, Unmoved], ...]

    def __str__(self) -> str:
        line = f"legalize_windows: {self.nodes_sunk} nodes sunk, {self.frees_delayed} frees delayed"
        return line + _describe_kept(self.unmoved)


def format_mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.3g} MiB" if size_bytes < 100 * MIB else f"{size_bytes / MIB:.0f} MiB"


def _describe_kept(kept: Iterable[tuple[str, enum.Enum]]) -> str:
    by_reason: dict[enum.Enum, list[str]] = {}
    for fqn, reason in kept:
        by_reason.setdefault(reason, []).append(fqn)
    if not by_reason:
        return ""
    groups = (f"{reason.value}: {_abbreviate(fqns)}" for reason, fqns in by_reason.items())
    return f"; kept {_count(by_reason)} ({'; '.join(groups)})"


def _abbreviate(fqns: list[str]) -> str:
    return ", ".join(fqns[:_NAMES_PER_REASON] + ["..."] * (len(fqns) > _NAMES_PER_REASON))


def _count(by_reason: Mapping[enum.Enum, list[str]]) -> int:
    return sum(map(len, by_reason.values()))
