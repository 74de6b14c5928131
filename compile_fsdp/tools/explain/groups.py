"""Table of the parameter groups: collectives, uses, and windows that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.names import GroupFacts
from compile_fsdp.tools.explain.timeline import Placed


@dataclass(frozen=True, slots=True)
class Use:
    """How one graph uses a group.

    Attributes:
        graph: Index of the graph.
        first: FQN of the first module that computes with the group, and its time in seconds from the start of the step.
        last: FQN and time of the last module that computes with the group, as in `first`.
        prefetch_events: Number of computations from the launch of the group's first gather to the group's first use;
            None if the graph gathers nothing of the group.
        prefetch_s: Seconds between the launch of the group's first gather and the group's first use.
    """

    graph: int
    first: tuple[str, float]
    last: tuple[str, float]
    prefetch_events: int | None
    prefetch_s: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One parameter group.

    Attributes:
        facts: Names and sizes of the group.
        gathers: Number of all-gathers in all graphs that carry a parameter of the group, alone or with further groups.
        reductions: Number of reduce-scatters in all graphs that carry a gradient of the group.
        windows: Number of traced windows of the group's parameters.
        windows_removed: Number of the group's windows that the passes have removed.
        kept: (parameter FQN, reason) of the group's windows that stay.
        uses: One entry for each graph that computes with the group.
    """

    facts: GroupFacts
    gathers: int
    reductions: int
    windows: int
    windows_removed: int
    kept: tuple[tuple[str, str], ...]
    uses: tuple[Use, ...]


def make_rows(
    groups: Sequence[GroupFacts],
    placed: Sequence[Placed],
    windows: Counter[str],
    windows_left: Counter[str],
    kept: Sequence[tuple[str, str]],
) -> tuple[GroupRow, ...]:
    """The rows of the table, one for each group.

    Args:
        groups: Parameter groups in the order in which graphs first used them.
        placed: The events of the step.
        windows: Number of traced windows in all graphs, by parameter FQN.
        windows_left: Number of windows in all graphs that the passes left, by parameter FQN.
        kept: (parameter FQN, reason) of the windows that stay.
    """
    rows = []
    for group in groups:
        own = set(group.parameters)
        carried = [each for each in placed if not own.isdisjoint(each.event.parameters)]
        traced = sum(windows[fqn] for fqn in own)
        uses = (_use(number, carried, placed) for number in dict.fromkeys(each.graph for each in carried))
        rows.append(
            GroupRow(
                facts=group,
                gathers=sum(each.event.kind is Kind.GATHER for each in carried),
                reductions=sum(each.event.kind is Kind.REDUCE for each in carried),
                windows=traced,
                windows_removed=traced - sum(windows_left[fqn] for fqn in own),
                kept=tuple((fqn, reason) for fqn, reason in kept if fqn in own),
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
