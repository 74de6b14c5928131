"""Reports of the compiler, one for each graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import fx

from compile_fsdp.advice import Advice, GroupFigures, advise
from compile_fsdp.passes import Costs, GraphObserver
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.text import count
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.torch_compat.dynamo import dynamo_counters

Direction = Literal["forward", "backward"]

_log = logging.getLogger("compile_fsdp")


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Report of a compiled graph.

    Attributes:
        direction: Whether the graph is a forward or a backward graph.
        inner_backend: The Dynamo backend that compiled the graph.
        windows_removed: Number of complete `resize(full), copy, resize(0)` windows that the passes removed.
        copies_removed: Number of `fsdp.copy_` ops that the passes removed.
        resizes_removed: Number of `inductor.resize_storage_bytes_` ops that the passes removed.
        kept: (parameter FQN, reason) of every window that the passes kept.
        nodes_before: Number of nodes before the passes.
        nodes_after: Number of nodes after the passes.
        seconds: Seconds spent in the passes.
        cached: Whether Inductor took the graph from its cache, so that no pass ran. The remaining attributes then have
            their values from the original compilation.
        decision: How the step is fitted into its `memory_budget`; None without a budget, and for backward graphs.
        costs: Costs by which the passes decided; None for a graph without sharded parameters.
        groups: Sizes of the forward graph's parameter groups, in order of first use; empty for backward graphs.
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
    decision: BudgetDecision | None = None
    costs: Costs | None = None
    groups: tuple[GroupFigures, ...] = ()

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Changes that make the step faster by the estimate, largest gain first; empty for backward graphs."""
        return advise(self.groups, self.costs, self.decision) if self.groups and self.costs is not None else ()

    def __str__(self) -> str:
        kept = "".join(f"; kept {fqn}: {reason}" for fqn, reason in self.kept[:3])
        more = f" and {len(self.kept) - 3} more" if len(self.kept) > 3 else ""
        return (
            f"{self.direction} graph ({self.inner_backend}): {count(self.windows_removed, 'window')} removed, "
            f"{self.nodes_before} -> {self.nodes_after} nodes in {self.seconds * 1e3:.1f} ms{kept}{more}"
            + (f"; {self.decision}" if self.decision is not None else "")
            + "".join(f"; {each}" for each in self.advice[:1])
        )


_reports: list[GraphReport] = []


def reports() -> tuple[GraphReport, ...]:
    """The reports of all graphs compiled in this process since `reset_reports()`, oldest first."""
    return tuple(_reports)


def reset_reports() -> None:
    """Forget all reports."""
    _reports.clear()


def count_captures() -> int:
    """Count the graphs that Dynamo and compiled autograd traced in this process, for any backend."""
    return dynamo_counters["stats"]["unique_graphs"] + dynamo_counters["compiled_autograd"]["captures"]


def record(report: GraphReport) -> None:
    _reports.append(report)
    _log.info("%s", report)


# Called before each graph is compiled, with the groups whose unsharded parameters are its inputs, and the costs, None
# for the device's. The result sees the Dynamo graph after each pass, if Inductor compiles the graph.
CompileObserver = Callable[[Direction, fx.GraphModule, Collection[TraceableGroup], Costs | None], GraphObserver]

_observer: CompileObserver | None = None


@contextmanager
def observing(observer: CompileObserver) -> Iterator[None]:
    """Compile every graph of any thread without caches, and show it to the observer, while the block runs."""
    global _observer
    outer, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = outer


def present_observer() -> CompileObserver | None:
    return _observer
