"""The table of parameter groups: what is gathered and reduced for each, when, and which windows stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from compile_fsdp.explain.events import Kind
from compile_fsdp.explain.names import GroupFacts
from compile_fsdp.explain.timeline import Placed


@dataclass(frozen=True, slots=True)
class Use:
    """How one graph uses a group.

    Attributes:
        graph: Its number.
        first: The module that computes with the group first, and when, in seconds since the start of the step.
        last: The same of the last.
        prefetch_events: Events in which something is computed between the launch of the group's first gather and its
            first use; None if the graph gathers nothing of it.
        prefetch_s: Seconds between these two.
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
        facts: Its parameters and bytes.
        gathers: All-gathers that carry any of them, in all graphs; a pack may carry several groups.
        reductions: Reduce-scatters, likewise.
        windows: Windows that were traced.
        windows_removed: Those that the passes have taken out.
        kept: (parameter FQN, reason) of the others.
        uses: By graph that computes with it.
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
    """One row for each group.

    Args:
        groups: In the order in which the graphs came to know them.
        placed: The events of the step.
        windows: Traced windows by parameter FQN, in all graphs.
        windows_left: Those that the passes have left.
        kept: (parameter FQN, reason) of what stays.
    """
    return tuple(_row(group, placed, windows, windows_left, kept) for group in groups)


def _row(
    group: GroupFacts,
    placed: Sequence[Placed],
    windows: Counter[str],
    windows_left: Counter[str],
    kept: Sequence[tuple[str, str]],
) -> GroupRow:
    own = set(group.parameters)
    carried = [each for each in placed if not own.isdisjoint(each.event.parameters)]
    traced = sum(windows[fqn] for fqn in own)
    uses = (_use(number, carried, placed) for number in dict.fromkeys(each.graph for each in carried))
    return GroupRow(
        facts=group,
        gathers=sum(each.event.kind is Kind.GATHER for each in carried),
        reductions=sum(each.event.kind is Kind.REDUCE for each in carried),
        windows=traced,
        windows_removed=traced - sum(windows_left[fqn] for fqn in own),
        kept=tuple((fqn, reason) for fqn, reason in kept if fqn in own),
        uses=tuple(use for use in uses if use is not None),
    )


def _use(graph: int, carried: Sequence[Placed], placed: Sequence[Placed]) -> Use | None:
    used = [each for each in carried if each.graph == graph and each.event.kind is Kind.COMPUTE]
    if not used:
        return None
    first, last = used[0], used[-1]
    launch = next((each for each in carried if each.graph == graph and each.event.kind is Kind.GATHER), None)
    between = None
    if launch is not None:
        positions = [i for i, each in enumerate(placed) if each is launch or each is first]
        between = sum(each.event.kind is Kind.COMPUTE for each in placed[positions[0] : positions[-1]])
    return Use(
        graph,
        (first.event.name, first.start_s),
        (last.event.name, last.start_s),
        between,
        max(0.0, first.start_s - launch.at_s) if launch is not None else 0.0,
    )
