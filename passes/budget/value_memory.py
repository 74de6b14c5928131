"""Bytes of a step's values: activations, their gradients, and offloaded and recomputed values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.analysis.step_time import Clock, LiveBytes
from compile_fsdp.passes.budget.op_facts import Kind
from compile_fsdp.passes.budget.step_memory import Choices, Step, Value


class ValueMemory:
    """Memory of the values of a step, whose places the clock reaches: see [Note: A timeline of both halves]."""

    def __init__(self, step: Step, clock: Clock, costs: Costs) -> None:
        self._step, self._clock, self._costs = step, clock, costs
        # By value, whether it is written to memory, and not only used inside a kernel.
        self._in_memory = {value: not step.fuses or self._is_in_memory(value) for value in step.values}
        self._joined: list[int] = []  # by op, the first op that is fused into its kernel
        for at, made in enumerate(step.made):
            sources = (source for value in made for source in value.sources if not self._in_memory[source])
            self._joined.append(min([at, *(self._joined[source.made_at] for source in sources)]))
        # By value, the last op of the forward that reads it. An op whose result takes no memory runs with its readers.
        self.last: dict[Value, int] = {}
        for value in reversed(list(step.values)):
            self.last[value] = self._find_last(value)

    def hold(self, held: LiveBytes, choices: Choices, begins: Mapping[int, int]) -> None:
        """Hold all values; `begins`: see `find_recomputations`."""
        made = (each for at in choices.offloaded for each in self._step.made[at])
        self._hold_offloaded(held, [each for each in made if each.is_saved], begins)
        for value in self._step.values:
            self._hold_value(held, value, choices, begins.get(value.made_at))
        for at, size in enumerate(self._step.internal):
            held.hold(at, at if at in choices.recomputed else self._step.mirrored(at), size)
        self._hold_values_behind_checkpoints(held)

    def _hold_offloaded(self, held: LiveBytes, values: Sequence[Value], begins: Mapping[int, int]) -> None:
        """Hold each value until the next offload, and from its fetch: see [Note: One stream for both ways]."""
        leaving = sorted(values, key=lambda value: (self.last[value], value.made_at))
        for value, following in zip(leaving, [*leaving[1:], *leaving[-1:]], strict=True):
            held.hold(value.made_at, self.last[following], value.size)
        needed = {
            value: min([self._first_read(value), *(begins[use] for use in value.uses if use in begins)])
            for value in values
        }
        free_until = math.inf
        for value in sorted(leaving, key=lambda value: needed[value], reverse=True):
            free_until = min(free_until, self._clock.starts[needed[value]]) - self._costs.transfer(value.size)
            place = max(self._clock.last_before(free_until), len(self._step.ops))
            held.hold(min(place, needed[value]), self._last_read(value), value.size)

    def _is_joined(self, value: Value, choices: Choices) -> bool:
        """Return whether a cheap op and its backward run in one kernel.

        The kernel holds all values that both compute. Inductor joins them if no gather stands between the two. Without
        offloading this does not count, because saved activations are the peak then.
        """
        window = self._step.windows[value.made_at]
        is_kept = window is None or window.number in choices.kept
        return bool(choices.offloaded) and is_kept and self._step.fuses and value.kind is Kind.FUSED

    def _hold_value(self, held: LiveBytes, value: Value, choices: Choices, begins: int | None) -> None:
        last, is_recomputed = self.last[value], value.made_at in choices.recomputed
        if value.is_saved and value.made_at in choices.offloaded:
            pass  # `_hold_offloaded` counts it
        elif value.is_saved and not is_recomputed:
            held.hold(value.made_at, max(self._last_read(value), last), value.size)
        elif self._in_memory[value]:
            held.hold(value.made_at, last, value.size)
            if value.saved_by:
                first = self._first_read(value)
                first = first if begins is None else min(first, begins)
                is_joined = self._is_joined(value, choices)
                last_read = self._step.mirrored(value.made_at) if is_joined else self._last_read(value)
                held.hold(first, last_read, value.size)
            elif begins is not None:
                held.hold(begins, begins, value.size)
        if value.needs_grad and self._in_memory[value]:
            held.hold(self._step.mirrored(last), self._backward_of(value.made_at), value.size)

    def _hold_values_behind_checkpoints(self, held: LiveBytes) -> None:
        """Hold the values whose gradients come after a checkpoint runs again.

        A checkpoint runs again after its parameters are gathered, which happens when the gradient of its result exists.
        Gradients of parameters that need its result, directly or through cheap ops, are computed after that.
        """
        for value in (value for value in self._step.values if value.is_from_checkpoint):
            until = self._step.mirrored(value.made_at)
            readers = [op for op in set(value.saved_by) if self._step.read[op]]
            for made in (made for op in readers for made in self._step.made[op] if self._in_memory[made]):
                begin = self._backward_of(made.made_at) + 1
                is_made_again = bool(made.saved_by) and not made.is_saved
                held.hold(begin, until, made.size * (made.needs_grad + is_made_again))

    def _backward_of(self, op: int) -> int:
        """Return where the backward of an op ends, with the ops that are fused with it."""
        return self._step.mirrored(self._joined[op])

    def _first_read(self, value: Value) -> int:
        """Return where the backward first reads a saved value."""
        return self._step.mirrored(max(value.saved_by))

    def _last_read(self, value: Value) -> int:
        """Return where the backward last reads a saved value. If ops are fused, their backwards are fused, too."""
        return self._step.mirrored(min(self._begin(self._joined[each]) for each in value.saved_by))

    def _begin(self, op: int) -> int:
        """Return the first op that runs when a saved value of this op may go: see [Note: Blocks]."""
        return op if self._step.fuses else self._step.block_at(op)[0]

    def _is_in_memory(self, value: Value) -> bool:
        readers = [each for each in value.uses if self._step.facts[each].kind is not Kind.VIEW]
        return (
            value.kind is Kind.HEAVY
            or value.is_saved
            or value.is_result
            or len(readers) > 1
            or any(self._step.facts[each].kind is Kind.HEAVY for each in readers)
        )

    def _find_last(self, value: Value) -> int:
        if value.is_result:
            return len(self._step.ops) - 1
        last = value.made_at
        for use in value.uses:
            made = self._step.made[use]
            is_fused = made and not any(self._in_memory[each] for each in made)
            last = max([last, *(self.last[each] for each in made)] if is_fused else [last, use])
        return last


def find_recomputations(step: Step, chosen: Collection[int]) -> dict[int, int]:
    """Map each op that the backward runs again to its place.

    These are chosen ops, checkpoints, cheap ops that are not fused with their readers, and unsaved or chosen
    sources of all these. The place is the earliest at which an op itself, or an op that needs it, runs again.
    """
    begins: dict[int, int] = {}
    unsaved = (value for value in step.values if value.saved_by and not value.is_saved)
    runs = {value.made_at for value in unsaved if not step.fuses or value.is_from_checkpoint}
    for op in sorted(runs.union(chosen), reverse=True):
        places = [step.mirrored(max(value.saved_by)) for value in step.made[op] if value.saved_by]
        begins[op] = min([*places, begins.get(op, step.mirrored(op))])
        stack = [op]
        while stack:
            for source in (source for value in step.made[stack.pop()] for source in value.sources):
                if source.is_saved and source.made_at not in chosen:
                    continue
                if begins.get(source.made_at, begins[op] + 1) > begins[op]:
                    begins[source.made_at] = begins[op]
                    stack.append(source.made_at)
    return begins
