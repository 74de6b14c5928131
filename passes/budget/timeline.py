"""Bytes that a step holds at each place, for given choices.

[Note: A timeline of both halves]
The timeline lists the ops of the forward in order, followed by as many places of the backward in mirrored order: the
backward of an op stands at the op's mirrored place. If the forward holds a value from one op to a later op, the
backward holds the value's gradient between the two mirrored places. A value saved for the backward is held from its op
to the backward of the first op that needs it.
"""

from __future__ import annotations

from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.analysis.step_time import Clock, LiveBytes
from compile_fsdp.passes.budget.parameter_memory import ParameterMemory
from compile_fsdp.passes.budget.step_memory import Choices, Step
from compile_fsdp.passes.budget.value_memory import ValueMemory, find_recomputations


class Timeline:
    """Places of a step whose parameters `ranks` ranks share, in time and in memory."""

    def __init__(self, step: Step, ranks: int, costs: Costs) -> None:
        self.step, self.ranks, self.costs = step, ranks, costs
        self.seconds = [costs.compute(each.flops, each.moved_bytes) for each in step.facts]  # (n,) of the forward
        # (n,) The backward of a matrix product has two products.
        self.backward_seconds = [
            seconds * (2 if each.flops else 1) for seconds, each in zip(self.seconds, step.facts, strict=True)
        ]
        self._clock = Clock([*self.seconds, *reversed(self.backward_seconds)])
        self._values = ValueMemory(step, self._clock, costs)
        self.parameters = ParameterMemory(step, ranks, self._clock, costs)
        # No choices within a body, because the user has placed its checkpoint.
        self._bodies = {at: _Body(Timeline(body, ranks, costs)) for at, body in step.bodies.items()}

    def held(self, choices: Choices) -> list[int]:
        """Return the bytes above the sharded state at each of the 2 n places."""
        held = LiveBytes(2 * len(self.step.ops))
        begins = find_recomputations(self.step, frozenset(choices.recomputed))
        self._values.hold(held, choices, begins)
        for at, body in self._bodies.items():
            backward = self.step.mirrored(at)
            again = at if self.step.is_body else begins.get(at, backward)
            # Two of these may be one place; the last entry counts there.
            for place, size in {at: body.peak, again: body.forward_peak, backward: body.peak}.items():
                held.hold(place, place, size)
            held.hold(again + 1, backward - 1, body.saved_bytes)
        self.parameters.hold(held, choices)
        return held.totals()

    def peak(self, choices: Choices) -> int:
        return max(self.held(choices), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved values, bodies included, if nothing is recomputed."""
        own = sum(value.size for value in self.step.values if value.is_saved) + sum(self.step.internal)
        return own + sum(body.saved_bytes for body in self._bodies.values())

    @property
    def forward_seconds(self) -> float:
        return sum(self.seconds)

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + sum(self.backward_seconds)

    @property
    def least_offloaded_bytes(self) -> int:
        """Bytes that the link carries within one latency; smaller tensors stay."""
        return int(self.costs.latency * self.costs.offload_bandwidth)

    def leaves_at(self, op: int) -> float:
        """Return the seconds from the beginning of the step to the forward's last use of an op's results."""
        return self._clock.starts[max(self._values.last[value] for value in self.step.made[op]) + 1]


class _Body:
    """Bytes that the body of a checkpoint holds."""

    def __init__(self, timeline: Timeline) -> None:
        held = timeline.held(Choices())
        self.peak = max(held, default=0)
        self.forward_peak = max(held[: len(held) // 2], default=0)
        self.saved_bytes = timeline.saved_bytes  # by its forward for its backward
