"""Table of the parameter groups: collectives, uses, and windows that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_fsdp.tools.explain.capture import CapturedGraph
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.names import GroupFacts
from compile_fsdp.tools.explain.timeline import Placed


@dataclass(frozen=True, slots=True)
class Use:
    """How one graph uses a group.

    The prefetch reaches from the launch of the group's first gather to the group's first use.
    """

    graph: int  # index of the graph
    first: tuple[str, float]  # FQN of the first module that computes with the group, and its seconds since the start
    last: tuple[str, float]  # of the last module that computes with the group
    prefetch_events: int | None  # number of computations; None if the graph gathers nothing of the group
    prefetch_s: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One parameter group, with counts over all graphs."""

    facts: GroupFacts
    gathers: int  # all-gathers that carry a parameter of the group, alone or with further groups
    reductions: int  # reduce-scatters that carry a gradient of the group
    windows: int  # in the traced graphs
    windows_removed: int  # by the passes
    kept: tuple[tuple[str, str], ...]  # (parameter FQN, reason) of the windows that stay
    uses: tuple[Use, ...]  # one for each graph that computes with the group


def make_rows(
    groups: Sequence[GroupFacts], placed: Sequence[Placed], graphs: Sequence[CapturedGraph]
) -> tuple[GroupRow, ...]:
    """Make a row for each group, from the events of the step and from the windows of its parameters in the graphs."""
    rows = []
    for group in groups:
        own = set(group.parameters)
        carried = [each for each in placed if not own.isdisjoint(each.event.parameters)]
        traced = sum(graph.windows[fqn] for graph in graphs for fqn in own)
        uses = (_use(number, carried, placed) for number in dict.fromkeys(each.graph for each in carried))
        rows.append(
            GroupRow(
                facts=group,
                gathers=sum(each.event.kind is Kind.GATHER for each in carried),
                reductions=sum(each.event.kind is Kind.REDUCE for each in carried),
                windows=traced,
                windows_removed=traced - sum(graph.windows_left[fqn] for graph in graphs for fqn in own),
                kept=tuple((fqn, reason) for graph in graphs for fqn, reason in graph.kept if fqn in own),
                uses=tuple(use for use in uses if use is not None),
            )
        )
    return tuple(rows)


def _use(graph: int, carried: Sequence[Placed], placed: Sequence[Placed]) -> Use | None:
    own = [each for each in carried if each.graph == graph]
    used = [each for each in own if each.event.kind is Kind.COMPUTE]
    if not used:
        return None
    first, last = used[0], used[-1]
    between, seconds = None, 0.0
    if (launch := next((each for each in own if each.event.kind is Kind.GATHER), None)) is not None:
        ends = [i for i, each in enumerate(placed) if each is launch or each is first]
        between = sum(each.event.kind is Kind.COMPUTE for each in placed[ends[0] : ends[-1]])
        seconds = max(0.0, first.start_s - launch.at_s)
    return Use(graph, (first.event.name, first.start_s), (last.event.name, last.start_s), between, seconds)
