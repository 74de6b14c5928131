"""Data of a report: graphs, timeline, parameter groups and their figures."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.tools.explain.capture import GraphBreak, Recompile, Stage
from compile_fsdp.tools.explain.events import TRANSFERS, Kind
from compile_fsdp.tools.explain.names import GroupFacts
from compile_fsdp.tools.explain.timeline import Placed


@dataclass(frozen=True, slots=True)
class GraphView:
    """A compiled graph after each pass."""

    kind: str  # "forward", "backward", or "evaluation" for a forward without a backward
    stages: tuple[Stage, ...]


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


@dataclass(frozen=True, slots=True)
class ReportData:
    """How a step was compiled, and its estimated times. See `compile_fsdp.passes.Costs` for the estimates."""

    model: str  # name of the model's class, or of the script
    world_size: int
    torch_version: str
    graphs: tuple[GraphView, ...]  # in the order of their compilation
    timeline: tuple[Placed, ...]  # the events of all graphs, in the order of `graphs`
    groups: tuple[GroupRow, ...]  # in the order of their first use
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    notes: tuple[str, ...]  # further remarks, such as warnings
    decisions: tuple[BudgetDecision, ...]  # for a `memory_budget`, one for each forward graph; empty without a budget

    @property
    def graph_names(self) -> list[str]:
        """The kind of each graph, with a number if several graphs are of it."""
        kinds = [graph.kind for graph in self.graphs]
        numbered = (f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds))
        return [name if kinds.count(kind) > 1 else kind for name, kind in zip(numbered, kinds, strict=True)]

    @property
    def graph_s(self) -> list[float]:
        """Estimated seconds of each graph, by its events that hold compute up."""
        seconds = [0.0] * len(self.graphs)
        for each in self.timeline:
            if each.event.collective < 0 or each.event.kind is Kind.WAIT:
                seconds[each.graph] += each.exposed_s if each.event.kind is Kind.WAIT else each.event.seconds
        return seconds

    @property
    def exposed_s(self) -> float:
        """Estimated seconds in which compute waits for communication, in all graphs together."""
        return sum(each.exposed_s for each in self.timeline)

    @property
    def communication_s(self) -> float:
        """Estimated seconds of the collectives of all graphs together, hidden behind compute or not."""
        launches = (each.event for each in self.timeline if each.event.kind is not Kind.WAIT)
        return sum(event.seconds for event in launches if event.collective >= 0 and event.kind not in TRANSFERS)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of unsharded parameters alive at a time."""
        return max((each.event.alive_bytes for each in self.timeline), default=0)

    @property
    def eager_peak_bytes(self) -> int:
        """Most bytes of unsharded parameters that eager FSDP2 would hold, see `timeline.eager_bytes`."""
        return max((each.eager_bytes for each in self.timeline), default=0)

    @property
    def allocated_bytes(self) -> int:
        """Most bytes above the sharded state that are alive at a time, by the reads of the graphs."""
        events = (each.event for each in self.timeline)
        alive = (each.alive_bytes + each.activation_bytes + each.recomputed_bytes for each in events)
        return max(alive, default=0)

    @property
    def budget_bytes(self) -> int | None:
        """The smallest memory budget of the graphs in bytes; None without a budget."""
        return min((decision.budget for decision in self.decisions), default=None)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parameters' shards on this rank."""
        return sum(row.facts.shard_bytes for row in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, ready for `json.dumps`."""
        seconds = ("graph_s", "exposed_s", "communication_s")
        sizes = ("peak_bytes", "eager_peak_bytes", "allocated_bytes", "budget_bytes", "shard_bytes")
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**plain, "figures": {name: getattr(self, name) for name in (*seconds, *sizes, "graph_names")}}


def make_rows(
    groups: Sequence[GroupFacts],
    placed: Sequence[Placed],
    windows: Counter[str],
    windows_left: Counter[str],
    kept: Sequence[tuple[str, str]],
) -> tuple[GroupRow, ...]:
    """Make a row for each group, from the events of the step and from the windows of its parameters, by FQN."""
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
