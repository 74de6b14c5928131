"""Bytes that a step holds at each place, for given choices.

See [Note: A timeline of both halves] in `step_memory.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from compile_fsdp.passes.analysis.costs import Costs, plan_gathers, plan_reductions
from compile_fsdp.passes.budget.op_facts import Kind
from compile_fsdp.passes.budget.step_memory import Group, Parameter, Step, Value


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a step that save memory.

    Attributes:
        kept: Numbers of the groups that stay unsharded from the forward to the backward.
        recomputed: Positions of the ops that the backward runs again.
        has_large_packs: Whether packs of several groups are gathered, and reduced, together.
        offloaded: Positions of the ops whose results wait for the backward in host memory.
    """

    kept: Collection[int] = frozenset()
    recomputed: Collection[int] = frozenset()
    has_large_packs: bool = False
    offloaded: Collection[int] = frozenset()


class Timeline:
    """Places of a step, in time and in memory.

    Args:
        step: The forward, and the values that its backward needs.
        ranks: Number of ranks that share the parameters.
        costs: Costs of the device.

    Attributes:
        seconds: Seconds of the forward, per op.
        backward_seconds: Seconds of the backward, per op.
    """

    def __init__(self, step: Step, ranks: int, costs: Costs) -> None:
        self.step, self.ranks, self.costs = step, ranks, costs
        self.seconds = [
            max(each.moved_bytes / costs.memory_bandwidth, each.flops / costs.flops) * (each.kind is not Kind.VIEW)
            for each in step.facts
        ]
        # The backward of a matrix product has two products.
        self.backward_seconds = [
            seconds * (2 if each.flops else 1) for seconds, each in zip(self.seconds, step.facts, strict=True)
        ]
        self._starts = [0.0, *accumulate([*self.seconds, *reversed(self.backward_seconds)])][:-1]
        self._in_memory = {value: not step.fuses or self._is_in_memory(value) for value in step.values}
        self._joined: list[int] = []
        for at, made in enumerate(step.made):
            sources = (source for value in made for source in value.sources if not self._in_memory[source])
            self._joined.append(min([at, *(self._joined[source.made_at] for source in sources)]))
        self._last: dict[Value, int] = {}
        for value in reversed(list(step.values)):
            self._last[value] = self._find_last(value)
        self._gathers = {group: _gathered_together(group, ranks, costs) for group in step.groups}
        reduced = [pack for group in step.groups for pack in _reduced_together(group, ranks, costs)]
        self._reductions = sorted(reduced, key=lambda pack: -pack.first)
        parameters = sum(group.size for group in step.groups)
        # Bytes that are gathered too early, or held too long for a reduction.
        self.large_pack_bytes = min(2 * costs.pack_bytes(ranks, is_spare=True) * ranks, parameters)
        # No choices within a body, because the user has placed its checkpoint.
        self._bodies = {at: _Body(Timeline(body, ranks, costs)) for at, body in step.bodies.items()}
        self._changes: list[int] = []

    def held(self, choices: Choices) -> list[int]:
        """Return the bytes above the sharded state at each place.

        n ops have 2 n places.
        """
        self._changes = [0] * (2 * len(self.step.ops) + 1)
        begins = self._find_recomputations(frozenset(choices.recomputed))
        self._hold_offloaded([each for at in choices.offloaded for each in self.step.made[at] if each.is_saved], begins)
        for value in self.step.values:
            self._hold_value(value, choices, begins.get(value.made_at))
        for at, size in enumerate(self.step.internal):
            self._hold(at, at if at in choices.recomputed else self._mirrored(at), size)
        for at, body in self._bodies.items():
            backward = self._mirrored(at)
            again = at if self.step.is_body else begins.get(at, backward)
            # Two of these may be one place; the last entry counts there.
            for place, size in {at: body.peak, again: body.forward_peak, backward: body.peak}.items():
                self._hold(place, place, size)
            self._hold(again + 1, backward - 1, body.saved_bytes)
        self._hold_what_waits_for_checkpoints()
        for i, group in enumerate(self.step.groups):
            is_kept = not group.frees or group.number in choices.kept
            self._hold_parameters(i, group, is_kept, choices.has_large_packs)
        self._hold_gradients()
        if choices.has_large_packs:
            self._hold(0, len(self._changes) - 2, self.large_pack_bytes)
        return list(accumulate(self._changes[:-1]))

    def peak(self, choices: Choices) -> int:
        """Return the most bytes at a time."""
        return max(self.held(choices), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved values, bodies included, if nothing is recomputed."""
        own = sum(value.size for value in self.step.values if value.is_saved) + sum(self.step.internal)
        return own + sum(body.saved_bytes for body in self._bodies.values())

    @property
    def packs(self) -> int:
        """Number of packs gathered in the forward and reduced in the backward."""
        return sum(map(len, self._gathers.values())) + len(self._reductions)

    @property
    def forward_seconds(self) -> float:
        return sum(self.seconds)

    @property
    def least_offloaded_bytes(self) -> int:
        """Bytes that the link carries within one latency; smaller tensors stay."""
        return int(self.costs.latency * self.costs.offload_bandwidth)

    def leaves_at(self, op: int) -> float:
        """Return when the forward last uses the results of an op.

        The time is in seconds from the beginning of the step.
        """
        return self._starts[max(self._last[value] for value in self.step.made[op]) + 1]

    def _mirrored(self, position: int) -> int:
        """Return the place of an op's backward."""
        return 2 * len(self.step.ops) - 1 - position

    def _hold(self, first: int, last: int, size: int) -> None:
        if first <= last:
            self._changes[first] += size
            self._changes[last + 1] -= size

    def _is_in_memory(self, value: Value) -> bool:
        readers = [each for each in value.uses if self.step.facts[each].kind is not Kind.VIEW]
        return (
            value.kind is Kind.HEAVY
            or value.is_saved
            or value.is_result
            or len(readers) > 1
            or any(self.step.facts[each].kind is Kind.HEAVY for each in readers)
        )

    def _find_last(self, value: Value) -> int:
        """Return the last op that reads the value.

        An op whose result takes no memory runs where its readers run.
        """
        if value.is_result:
            return len(self.step.ops) - 1
        last = value.made_at
        for use in value.uses:
            made = self.step.made[use]
            is_fused = made and not any(self._in_memory[each] for each in made)
            last = max([last, *(self._last[each] for each in made)] if is_fused else [last, use])
        return last

    def _find_recomputations(self, chosen: Collection[int]) -> dict[int, int]:
        """Map each op that the backward runs again to its place.

        These are chosen ops, checkpoints, cheap ops that are not fused with their readers, and unsaved or chosen
        sources of all these. The place is the earliest at which an op itself, or an op that needs it, runs again.
        """
        step, begins = self.step, dict[int, int]()
        unsaved = (value for value in step.values if value.saved_by and not value.is_saved)
        runs = {value.made_at for value in unsaved if not step.fuses or value.is_from_checkpoint}
        for op in sorted(runs.union(chosen), reverse=True):
            places = [self._mirrored(max(value.saved_by)) for value in self.step.made[op] if value.saved_by]
            begins[op] = min([*places, begins.get(op, self._mirrored(op))])
            stack = [op]
            while stack:
                for source in (source for value in self.step.made[stack.pop()] for source in value.sources):
                    if source.is_saved and source.made_at not in chosen:
                        continue
                    if begins.get(source.made_at, begins[op] + 1) > begins[op]:
                        begins[source.made_at] = begins[op]
                        stack.append(source.made_at)
        return begins

    def _hold_offloaded(self, values: Sequence[Value], begins: Mapping[int, int]) -> None:
        """Hold each value until the next offload, and again from its fetch.

        See [Note: One stream for both ways].
        """
        leaving = sorted(values, key=lambda value: (self._last[value], value.made_at))
        for value, following in zip(leaving, [*leaving[1:], *leaving[-1:]], strict=True):
            self._hold(value.made_at, self._last[following], value.size)
        needed = {
            value: min([self._first_read(value), *(begins[use] for use in value.uses if use in begins)])
            for value in values
        }
        free_until = math.inf
        for value in sorted(leaving, key=lambda value: needed[value], reverse=True):
            free_until = min(free_until, self._starts[needed[value]]) - self.costs.transfer(value.size)
            place = max(bisect_right(self._starts, free_until) - 1, len(self.step.ops))
            self._hold(min(place, needed[value]), self._last_read(value), value.size)

    def _is_joined(self, value: Value, choices: Choices) -> bool:
        """Return whether a cheap op and its backward run in one kernel.

        The kernel holds all values that both compute. Inductor joins them if no gather stands between the two. Without
        offloading this does not count, because saved activations are the peak then.
        """
        window = self.step.windows[value.made_at]
        is_kept = window is None or window.number in choices.kept
        return bool(choices.offloaded) and is_kept and self.step.fuses and value.kind is Kind.FUSED

    def _hold_value(self, value: Value, choices: Choices, begins: int | None) -> None:
        last, is_recomputed = self._last[value], value.made_at in choices.recomputed
        if value.is_saved and value.made_at in choices.offloaded:
            pass  # `_hold_offloaded` counts it
        elif value.is_saved and not is_recomputed:
            self._hold(value.made_at, max(self._last_read(value), last), value.size)
        elif self._in_memory[value]:
            self._hold(value.made_at, last, value.size)
            if value.saved_by:
                first = self._first_read(value)
                first = first if begins is None else min(first, begins)
                last_read = self._mirrored(value.made_at) if self._is_joined(value, choices) else self._last_read(value)
                self._hold(first, last_read, value.size)
            elif begins is not None:
                self._hold(begins, begins, value.size)
        if value.needs_grad and self._in_memory[value]:
            self._hold(self._mirrored(last), self._mirrored(self._joined[value.made_at]), value.size)

    def _first_read(self, value: Value) -> int:
        """Return where the backward first reads a saved value."""
        return self._mirrored(max(value.saved_by))

    def _last_read(self, value: Value) -> int:
        """Return where the backward last reads a saved value.

        If ops are fused, their backwards are fused, too.
        """
        return self._mirrored(min(self._joined[each] for each in value.saved_by))

    def _hold_what_waits_for_checkpoints(self) -> None:
        """Hold the values whose gradients come after a checkpoint runs again.

        A checkpoint runs again after its parameters are gathered, which happens when the gradient of its result exists.
        Gradients of parameters that need its result, directly or through cheap ops, are computed after that.
        """
        for value in (value for value in self.step.values if value.is_from_checkpoint):
            until = self._mirrored(value.made_at)
            readers = [op for op in set(value.saved_by) if self.step.read[op]]
            for made in (made for op in readers for made in self.step.made[op] if self._in_memory[made]):
                begin = self._mirrored(self._joined[made.made_at]) + 1
                is_made_again = bool(made.saved_by) and not made.is_saved
                self._hold(begin, until, made.size * (made.needs_grad + is_made_again))

    def _hold_parameters(self, index: int, group: Group, is_kept: bool, has_large_packs: bool) -> None:
        groups = self.step.groups
        before = min(groups[index - 1].uses) if index else min(group.uses)
        after = max(groups[index + 1].uses) if index + 1 < len(groups) else max(group.uses)
        for pack in self._gathers[group]:
            first, last = self._mirrored(pack.last), self._mirrored(pack.first)
            launched = max(self._sent_before(pack.first, pack), before)
            if is_kept:
                self._hold(launched, last, pack.size)
                if not has_large_packs:  # large packs are counted in `held`
                    self._hold(launched, pack.last, pack.held_bytes - pack.size)
            else:
                self._hold(launched, pack.last, pack.held_bytes)
                launched = max(self._sent_before(first, pack), self._mirrored(after))
                self._hold(min(launched, first), last, pack.held_bytes)

    def _hold_gradients(self) -> None:
        packs = self._reductions
        whole = [self._mirrored(pack.first) for pack in packs]
        end = len(self._changes) - 2
        for pack, launched, following in zip(packs, whole, [*whole, end][1:], strict=True):
            for parameter in pack.parameters:
                self._hold(self._mirrored(max(parameter.uses)), launched, parameter.size)
                self._hold(launched, end, parameter.sharding.shard_bytes)
            # At most one reduction is in flight.
            arrived = min(self._arrived(launched, pack), following)
            sent = sum(parameter.sharding.reduced_bytes for parameter in pack.parameters)
            self._hold(launched + (len(pack.parameters) == 1), arrived, sent)

    def _sent_before(self, place: int, pack: _Pack) -> int:
        """Return where a gather is launched to arrive before a place."""
        return max(bisect_right(self._starts, self._starts[place] - self._collective(pack)) - 1, 0)

    def _arrived(self, place: int, pack: _Pack) -> int:
        """Return where a reduction launched at a place has arrived."""
        return min(bisect_left(self._starts, self._starts[place] + self._collective(pack)), len(self._starts) - 1)

    def _collective(self, pack: _Pack) -> float:
        return self.costs.collective(pack.size // self.ranks, self.ranks)


class _Body:
    """Bytes that the body of a checkpoint holds.

    Attributes:
        peak: Most bytes in its forward and backward.
        forward_peak: Most bytes in its forward.
        saved_bytes: Bytes that its forward saves for its backward.
    """

    def __init__(self, timeline: Timeline) -> None:
        held = timeline.held(Choices())
        self.peak = max(held, default=0)
        self.forward_peak = max(held[: len(held) // 2], default=0)
        self.saved_bytes = timeline.saved_bytes


@dataclass(frozen=True, slots=True)
class _Pack:
    """Parameters that travel together; a large parameter travels alone."""

    parameters: tuple[Parameter, ...]

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def held_bytes(self) -> int:
        """Bytes of the gathered pack, plus copies out of a shared pack."""
        return self.size * (2 if len(self.parameters) > 1 else 1)

    @property
    def first(self) -> int:
        return min(min(parameter.uses) for parameter in self.parameters)

    @property
    def last(self) -> int:
        return max(max(parameter.uses) for parameter in self.parameters)


def _gathered_together(group: Group, ranks: int, costs: Costs) -> list[_Pack]:
    """Return the packs that `pack_gathers` makes."""
    used = [parameter for parameter in group.parameters if parameter.uses]
    shards = [parameter.size // ranks for parameter in used]
    packs = plan_gathers(shards, ranks, costs.pack_bytes(ranks), costs)
    return [_Pack(tuple(used[i] for i in pack)) for pack in packs]


def _reduced_together(group: Group, ranks: int, costs: Costs) -> list[_Pack]:
    """Return the packs that `pack_reductions` makes."""
    trained = [parameter for parameter in group.parameters if parameter.uses and parameter.needs_grad]
    sizes = [parameter.sharding.reduced_bytes for parameter in trained]
    packs = plan_reductions(sizes, costs.pack_bytes(ranks) * ranks, costs)
    return [_Pack(tuple(trained[i] for i in pack)) for pack in packs]
