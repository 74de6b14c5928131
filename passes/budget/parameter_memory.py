"""Bytes of a step's unsharded parameters and their gradients, as the passes pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_fsdp.passes.analysis.costs import Costs, plan_gathers, plan_reductions
from compile_fsdp.passes.analysis.step_time import Clock, LiveBytes
from compile_fsdp.passes.budget.step_memory import Choices, Group, Parameter, Step


class ParameterMemory:
    """Memory of the parameters and gradients of a step, whose places the clock reaches."""

    def __init__(self, step: Step, ranks: int, clock: Clock, costs: Costs) -> None:
        self._step, self._ranks, self._clock, self._costs = step, ranks, clock, costs
        self._gathers = {group: self._gathered_together(group) for group in step.groups}
        reduced = [pack for group in step.groups for pack in self._reduced_together(group)]
        self._reductions = sorted(reduced, key=lambda pack: -pack.first)
        # Number of packs gathered in the forward and reduced in the backward.
        self.packs = sum(map(len, self._gathers.values())) + len(self._reductions)
        parameters = sum(group.size for group in step.groups)
        # Bytes that large packs gather too early, or hold too long for a reduction.
        self.large_pack_bytes = min(2 * costs.pack_bytes(ranks, is_spare=True) * ranks, parameters)

    def hold(self, held: LiveBytes, choices: Choices) -> None:
        for i, group in enumerate(self._step.groups):
            is_kept = not group.frees or group.number in choices.kept
            self._hold_parameters(held, i, group, is_kept, choices.has_large_packs)
        self._hold_gradients(held)
        if choices.has_large_packs:
            held.hold(0, 2 * len(self._step.ops) - 1, self.large_pack_bytes)

    def _hold_parameters(self, held: LiveBytes, index: int, group: Group, is_kept: bool, has_large_packs: bool) -> None:
        groups = self._step.groups
        before = self._first(groups[index - 1] if index else group)
        after = self._last(groups[index + 1] if index + 1 < len(groups) else group)
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
            arrived = self._clock.first_after(self._clock.starts[launched] + self._collective(pack))
            arrived = min(arrived, following)  # because at most one reduction is in flight
            sent = sum(parameter.sharding.reduced_bytes for parameter in pack.parameters)
            held.hold(launched + (len(pack.parameters) == 1), arrived, sent)

    def _sent_before(self, place: int, pack: _Pack) -> int:
        """Return where a gather is launched to arrive before a place."""
        launched = self._clock.last_before(self._clock.starts[place] - self._collective(pack))
        if launched < len(self._step.ops):
            return self._step.block_at(launched)[0]
        return self._step.mirrored(self._step.block_at(self._step.mirrored(launched))[-1])

    def _collective(self, pack: _Pack) -> float:
        return self._costs.collective(pack.size // self._ranks, self._ranks)

    def _first(self, used: Group | Parameter) -> int:
        return min(self._step.block_at(use)[0] for use in used.uses)

    def _last(self, used: Group | Parameter) -> int:
        return max(self._step.block_at(use)[-1] for use in used.uses)

    def _gathered_together(self, group: Group) -> list[_Pack]:
        """Return the packs that `pack_gathers` makes."""
        used = [parameter for parameter in group.parameters if parameter.uses]
        sizes = [parameter.size // self._ranks for parameter in used]
        return self._packs(used, plan_gathers(sizes, self._ranks, self._costs))

    def _reduced_together(self, group: Group) -> list[_Pack]:
        """Return the packs that `pack_reductions` makes."""
        trained = [parameter for parameter in group.parameters if parameter.uses and parameter.needs_grad]
        sizes = [parameter.sharding.reduced_bytes for parameter in trained]
        return self._packs(trained, plan_reductions(sizes, self._ranks, self._costs))

    def _packs(self, parameters: Sequence[Parameter], plan: Sequence[Sequence[int]]) -> list[_Pack]:
        packs = [tuple(parameters[i] for i in pack) for pack in plan]
        return [_Pack(pack, min(map(self._first, pack)), max(map(self._last, pack))) for pack in packs]


@dataclass(frozen=True, slots=True)
class _Pack:
    """Parameters that travel together; a large parameter travels alone."""

    parameters: tuple[Parameter, ...]
    first: int  # op that uses one
    last: int

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def held_bytes(self) -> int:
        """Bytes of the gathered pack, plus copies out of a shared pack."""
        return self.size * (2 if len(self.parameters) > 1 else 1)
