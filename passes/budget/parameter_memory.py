"""Bytes of a step's unsharded parameters and their gradients, as the passes pack them."""

from __future__ import annotations

from dataclasses import dataclass

from compile_fsdp.passes.analysis.costs import Costs, plan_gathers, plan_reductions
from compile_fsdp.passes.analysis.live_bytes import LiveBytes
from compile_fsdp.passes.analysis.step_time import Clock
from compile_fsdp.passes.budget.step_memory import Choices, Group, Parameter, Step


class ParameterMemory:
    """Memory of the parameters and gradients of a step, whose places the clock reaches."""

    def __init__(self, step: Step, ranks: int, clock: Clock, costs: Costs) -> None:
        self._step, self._ranks, self._clock, self._costs = step, ranks, clock, costs
        self._gathers = {group: _gathered_together(group, ranks, costs) for group in step.groups}
        reduced = [pack for group in step.groups for pack in _reduced_together(group, ranks, costs)]
        self._reductions = sorted(reduced, key=lambda pack: -pack.first)
        # Number of packs gathered in the forward and reduced in the backward.
        self.packs = sum(map(len, self._gathers.values())) + len(self._reductions)
        parameters = sum(group.size for group in step.groups)
        # Bytes that large packs gather too early, or hold too long for a reduction.
        self.large_pack_bytes = min(2 * costs.pack_bytes(ranks, is_spare=True) * ranks, parameters)

    def hold(self, held: LiveBytes, choices: Choices) -> None:
        """Hold all parameters and gradients."""
        for i, group in enumerate(self._step.groups):
            is_kept = not group.frees or group.number in choices.kept
            self._hold_parameters(held, i, group, is_kept, choices.has_large_packs)
        self._hold_gradients(held)
        if choices.has_large_packs:
            held.hold(0, 2 * len(self._step.ops) - 1, self.large_pack_bytes)

    def _hold_parameters(self, held: LiveBytes, index: int, group: Group, is_kept: bool, has_large_packs: bool) -> None:
        groups = self._step.groups
        before = min(groups[index - 1].uses) if index else min(group.uses)
        after = max(groups[index + 1].uses) if index + 1 < len(groups) else max(group.uses)
        for pack in self._gathers[group]:
            first, last = self._step.mirrored(pack.last), self._step.mirrored(pack.first)
            launched = max(self._sent_before(pack.first, pack), before)
            if is_kept:
                held.hold(launched, last, pack.size)
                if not has_large_packs:  # large packs are counted in `hold`
                    held.hold(launched, pack.last, pack.held_bytes - pack.size)
            else:
                held.hold(launched, pack.last, pack.held_bytes)
                launched = max(self._sent_before(first, pack), self._step.mirrored(after))
                held.hold(min(launched, first), last, pack.held_bytes)

    def _hold_gradients(self, held: LiveBytes) -> None:
        packs = self._reductions
        whole = [self._step.mirrored(pack.first) for pack in packs]
        end = 2 * len(self._step.ops) - 1
        for pack, launched, following in zip(packs, whole, [*whole, end][1:], strict=True):
            for parameter in pack.parameters:
                held.hold(self._step.mirrored(max(parameter.uses)), launched, parameter.size)
                held.hold(launched, end, parameter.sharding.shard_bytes)
            # At most one reduction is in flight.
            arrived = min(self._arrived(launched, pack), following)
            sent = sum(parameter.sharding.reduced_bytes for parameter in pack.parameters)
            held.hold(launched + (len(pack.parameters) == 1), arrived, sent)

    def _sent_before(self, place: int, pack: _Pack) -> int:
        """Return where a gather is launched to arrive before a place."""
        return self._clock.last_before(self._clock.starts[place] - self._collective(pack))

    def _arrived(self, place: int, pack: _Pack) -> int:
        """Return where a reduction launched at a place has arrived."""
        return self._clock.first_after(self._clock.starts[place] + self._collective(pack))

    def _collective(self, pack: _Pack) -> float:
        return self._costs.collective(pack.size // self._ranks, self._ranks)


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
    packs = plan_gathers([parameter.size // ranks for parameter in used], ranks, costs)
    return [_Pack(tuple(used[i] for i in pack)) for pack in packs]


def _reduced_together(group: Group, ranks: int, costs: Costs) -> list[_Pack]:
    """Return the packs that `pack_reductions` makes."""
    trained = [parameter for parameter in group.parameters if parameter.uses and parameter.needs_grad]
    packs = plan_reductions([parameter.sharding.reduced_bytes for parameter in trained], ranks, costs)
    return [_Pack(tuple(trained[i] for i in pack)) for pack in packs]
