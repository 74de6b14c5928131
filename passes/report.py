"""Reports of passes: changes to a graph, and reasons for kept windows."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from torch import fx

from compile_fsdp.passes.text import format_bytes, list_names

# Returns the parameter FQN of a placeholder, for reports.
Names = Callable[[fx.Node], str]

node_name: Names = attrgetter("name")


class Kept(enum.Enum):
    """Why a window stays in the graph, which is correct, and costs its copy and its memory."""

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
    """Why `legalize_windows` left a parameter's reads and frees in place."""

    NO_COPY = "read, but not filled by a copy"
    MUTATED = "mutated outside its fills"
    FILL_DEPENDS_ON_READ = "a fill depends on a read"
    AUTOCAST = "read would cross an autocast switch"


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Result of a pass on one graph, subgraphs of higher-order ops included.

    Attributes:
        name: Name of the pass.
        windows_removed: Number of complete windows removed from the graph.
        copies_removed: Number of `fsdp.copy_` ops removed.
        resizes_removed: Number of `inductor.resize_storage_bytes_` ops removed.
        bytes_removed: Bytes that the removed windows allocated. A symbolic size counts as its hint, if any, or as 0.
        kept: (parameter FQN, reason) of each kept window, parameters in graph order.
        nodes_before: Number of nodes before the pass.
        nodes_after: Number of nodes after the pass.
        seconds: Seconds in the pass, without linting and logging, as the pipeline measures them.
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
        removed = f"{self.windows_removed} of {windows} windows removed, {format_bytes(self.bytes_removed)}"
        return f"{self.name}: {removed}{_describe_kept(self.kept)}"


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Result of a pass that only counts its changes.

    Attributes:
        name: Name of the pass.
        nodes_before: Number of nodes before the pass.
        nodes_after: Number of nodes after the pass.
        counts: (label, count) pairs. The pass defines the labels; a label that begins with "bytes_" counts bytes.
        seconds: Seconds in the pass, without linting and logging, as the pipeline measures them.
    """

    name: str
    nodes_before: int
    nodes_after: int
    counts: tuple[tuple[str, int], ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = (
            f"{label.removeprefix('bytes_')} {format_bytes(size) if label.startswith('bytes_') else size}"
            for label, size in self.counts
        )
        return f"{self.name}: " + ", ".join(counts).replace("_", " ")


Report = WindowReport | PassCounts


def to_json(reports: Iterable[Report]) -> str:
    return json.dumps([asdict(report) for report in reports], default=lambda reason: reason.value)


def from_json(text: str) -> tuple[Report, ...]:
    return tuple(map(_from_row, json.loads(text)))


def _from_row(row: dict[str, Any]) -> Report:
    if "counts" in row:
        return PassCounts(**{**row, "counts": tuple(map(tuple, row["counts"]))})
    return WindowReport(**{**row, "kept": tuple((name, Kept(reason)) for name, reason in row["kept"])})


@dataclass(frozen=True, slots=True)
class LegalizeReport:
    """Result of `legalize_windows` on one graph.

    Attributes:
        nodes_sunk: Number of nodes moved behind the fill that they, or their inputs, read.
        frees_delayed: Number of `resize(0)` ops moved behind the last read of their parameter.
        unmoved: (parameter FQN, reason) of each parameter with an illegal read that stays.
    """

    nodes_sunk: int
    frees_delayed: int
    unmoved: tuple[tuple[str, Unmoved], ...]

    def __str__(self) -> str:
        kept = _describe_kept(self.unmoved)
        return f"legalize_windows: nodes sunk {self.nodes_sunk}, frees delayed {self.frees_delayed}{kept}"


def _describe_kept(kept: Iterable[tuple[str, enum.Enum]]) -> str:
    by_reason: dict[enum.Enum, list[str]] = {}
    for fqn, reason in kept:
        by_reason.setdefault(reason, []).append(fqn)
    if not by_reason:
        return ""
    groups = (f"{reason.value}: {list_names(fqns)}" for reason, fqns in by_reason.items())
    return f"; kept {sum(map(len, by_reason.values()))} ({'; '.join(groups)})"
