"""Estimate when the events of a step happen, by the costs of compute and communication.

Computations run in the order of the graph. Collectives share one wire and run in sequence: each starts as soon as it is
launched and the wire is free. This is an alpha-beta model, see `compile_fsdp.passes.Costs`. Offloads and fetches use a
separate link. A wait that starts before its collective has ended exposes the time in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from compile_fsdp.passes.analysis.step_time import Link, LiveBytes
from compile_fsdp.tools.explain.events import TRANSFERS, Event, Kind
from compile_fsdp.tools.explain.names import GroupFacts


@dataclass(frozen=True, slots=True)
class Placed:
    """An event with its place in time, in seconds from the start of the step."""

    event: Event
    graph: int  # index of the event's graph
    at_s: float  # when compute reaches the event
    start_s: float  # when the event starts: a collective may have to wait for the wire
    exposed_s: float  # how long compute stands still in a wait; 0 if the event is not a wait
    eager_bytes: int  # bytes that eager FSDP2 would hold at the event, see `eager_bytes()`


def place(
    graphs: Sequence[Sequence[Event]], groups: Sequence[GroupFacts], backwards: Collection[int] = ()
) -> list[Placed]:
    """Place the events of a step's graphs in time, graph by graph; `backwards` are the indices of backward graphs."""
    placed = []
    now, wire, host = 0.0, Link(), Link()
    for number, events in enumerate(graphs):
        eager = eager_bytes(events, groups, number in backwards)
        arrived: dict[int, float] = {}
        for event, held in zip(events, eager, strict=True):
            at, start, exposed = now, now, 0.0
            if event.kind is Kind.WAIT:
                exposed = max(0.0, arrived.get(event.collective, now) - now)
                now += exposed
            elif event.collective >= 0:
                link = host if event.kind in TRANSFERS else wire
                start = link.send(now, event.seconds)
                arrived[event.collective] = link.free
            else:
                now += event.seconds
            placed.append(Placed(event, number, at, start, exposed, held))
    return placed


def eager_bytes(events: Sequence[Event], groups: Sequence[GroupFacts], is_backward: bool) -> list[int]:
    """Bytes of gathers and unsharded parameters that eager FSDP2 would hold at each event of a graph.

    A model, not a measurement: a group is gathered at the first use of the previous group, copied out of the gather at
    its own first use, and freed after its last use. A group that eager FSDP2 does not reshard after the forward, such
    as the root's group, lives to the end of a forward graph, and from the start of a backward graph, without a gather.
    """
    computations = [(i, event) for i, event in enumerate(events) if event.kind is Kind.COMPUTE]
    uses = []  # first and last computation with parameters or gradients of each group
    for group in groups:
        own = set(group.parameters)
        if found := [i for i, each in computations if not own.isdisjoint((*each.parameters, *each.gradients))]:
            uses.append((found[0], found[-1], group))
    uses.sort(key=lambda use: use[:2])
    held = LiveBytes(len(events))
    for i, (first, last, group) in enumerate(uses):
        if group.reshards or not is_backward:
            held.hold(uses[i - 1][0] if i > 0 else 0, first, group.unsharded_bytes)
        if not group.reshards:
            first, last = (0, last) if is_backward else (first, len(events) - 1)
        held.hold(first, last, group.unsharded_bytes)
    return held.totals()
