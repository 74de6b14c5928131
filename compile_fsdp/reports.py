"""What the compiler did, graph by graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import fx

from compile_fsdp.passes import Costs, GraphObserver

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup

Direction = Literal["forward", "backward"]

_log = logging.getLogger("compile_fsdp")


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        direction: Which half of the step the graph is.
        inner_backend: The Dynamo backend that compiled it.
        windows_removed: Complete `resize(full), copy, resize(0)` windows taken out.
        copies_removed: `fsdp.copy_` ops taken out.
        resizes_removed: `inductor.resize_storage_bytes_` ops taken out.
        kept: (parameter FQN, reason) of every window left alone.
        nodes_before: Nodes of the graph that the passes got.
        nodes_after: Nodes of the graph that they left.
        seconds: Time in the passes.
        cached: True if Inductor took the compiled graph from its cache, so that no pass ran. The rest is then what
            was reported when the graph was compiled.
    """

    direction: Direction
    inner_backend: str
    windows_removed: int
    copies_removed: int
    resizes_removed: int
    kept: tuple[tuple[str, str], ...]
    nodes_before: int
    nodes_after: int
    seconds: float
    cached: bool

    def __str__(self) -> str:
        kept = "".join(f"; kept {fqn}: {reason}" for fqn, reason in self.kept[:3])
        more = f" and {len(self.kept) - 3} more" if len(self.kept) > 3 else ""
        return (
            f"{self.direction} graph ({self.inner_backend}): {self.windows_removed} windows removed, "
            f"{self.nodes_before} -> {self.nodes_after} nodes in {self.seconds * 1e3:.1f} ms{kept}{more}"
        )


_lock = threading.Lock()
_reports: list[GraphReport] = []


def reports() -> tuple[GraphReport, ...]:
    """The reports of every graph compiled in this process since `reset_reports()`, oldest first."""
    with _lock:
        return tuple(_reports)


def reset_reports() -> None:
    """Forget all reports."""
    with _lock:
        _reports.clear()


def record(report: GraphReport) -> None:
    with _lock:
        _reports.append(report)
    _log.info("%s", report)


class CompileObserver(Protocol):
    """An observer that is told of every graph that is about to be compiled."""

    def begin(
        self, direction: Direction, gm: fx.GraphModule, groups: Collection[TraceableGroup], costs: Costs | None
    ) -> GraphObserver:
        """Begin to observe a graph; the result sees it between the passes, if Inductor compiles it.

        Args:
            direction: Which half of the step the graph is.
            gm: The Dynamo graph.
            groups: Parameter groups whose unsharded parameters are inputs of the graph.
            costs: The costs by which the passes decide; None for the costs of the device.
        """


_observer: CompileObserver | None = None


@contextmanager
def observing(observer: CompileObserver) -> Iterator[None]:
    """While the block runs, compile every graph of any thread anew, without caches, and show it to the observer."""
    global _observer
    outer, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = outer


def present_observer() -> CompileObserver | None:
    return _observer
