"""What would make a compiled step faster, by an estimate: from the sizes of its groups and the costs of the device.

[Note: Two estimates of a step]
Communication runs beside compute, and nobody knows beforehand how much of it is hidden. So a step has two estimates: in
one, each half hides all that it can, and takes as long as the longer of the two; in the other nothing is hidden. What a
change gains is somewhere between what it gains by the one and by the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compile_fsdp.passes.analysis.costs import Costs, plan_gathers, plan_packs, plan_reductions
from compile_fsdp.passes.budget.choose import SAVED_LATENCIES
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.report import format_mib

# Of a step: what gains less is not worth a sentence, since the estimate may be off by more.
LEAST_SHARE = 0.02

# From so many groups in the place of one.
_FEW_GROUPS = 2


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A parameter group of a forward graph, as far as a step's time depends on it.

    Attributes:
        name: FQN of its module.
        unsharded: (parameters,) bytes of each, unsharded.
        reduced: (trained parameters,) bytes of each gradient before it is reduced.
        factors: Elements of its parameters that are matrices, or have more dims. An embedding counts as one.
        ranks: That it is sharded over.
        backward_ranks: That the backward gathers it over again; 1 if it stays unsharded until then.
    """

    name: str
    unsharded: tuple[int, ...]
    reduced: tuple[int, ...]
    factors: int
    ranks: int
    backward_ranks: int

    @property
    def size(self) -> int:
        """Bytes of all its parameters, unsharded."""
        return sum(self.unsharded)


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would make steps faster, by the estimate.

    Attributes:
        change: What to change, in words.
        least_seconds: What it saves of a step if as much communication as possible is hidden behind compute.
        most_seconds: What it saves if none is.
        step_seconds: What a step takes now, if none is.
    """

    change: str
    least_seconds: float
    most_seconds: float
    step_seconds: float

    def __str__(self) -> str:
        most, step = self.most_seconds * 1e3, self.step_seconds * 1e3
        least = f"{self.least_seconds * 1e3:.3g} to " if self.least_seconds > 0.05 * self.most_seconds else "up to "
        least = "" if self.least_seconds > 0.95 * self.most_seconds else least
        takes = f"whose matrix products and collectives take about {step:.3g} ms"
        return f"estimated: {self.change} would take {least}{most:.3g} ms off a step, {takes}"

    @property
    def sentence(self) -> str:
        """The same as a sentence of its own."""
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, slots=True)
class _Half:
    """Seconds of a forward or a backward."""

    compute: float
    communication: float

    @property
    def hidden(self) -> float:
        return max(self.compute, self.communication)

    @property
    def exposed(self) -> float:
        return self.compute + self.communication


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds of a step. See [Note: Two estimates of a step]."""

    forward: _Half
    backward: _Half

    @property
    def hidden(self) -> float:
        return self.forward.hidden + self.backward.hidden

    @property
    def exposed(self) -> float:
        return self.forward.exposed + self.backward.exposed

    def less(self, *, forward: float = 0.0, backward: float = 0.0, compute: float = 0.0) -> _Time:
        """With less communication in the halves, and less compute in the backward."""
        return _Time(
            replace(self.forward, communication=self.forward.communication - forward),
            _Half(self.backward.compute - compute, self.backward.communication - backward),
        )


def advise(groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None) -> tuple[Advice, ...]:
    """What would gain more than a little, what gains the most first.

    Args:
        groups: Of a forward graph, in the order of their use.
        costs: Of the device, with the rows of the batch.
        decision: How the step was fitted into its memory budget, if it has one.
    """
    now = _time(groups, costs, decision)
    changes = [*_with_more_memory(groups, costs, decision, now), *_with_larger_groups(groups, costs, decision, now)]
    found = (Advice(text, now.hidden - then.hidden, now.exposed - then.exposed, now.exposed) for text, then in changes)
    worth = [each for each in found if each.most_seconds >= LEAST_SHARE * each.step_seconds]
    return tuple(sorted(worth, key=lambda each: -each.most_seconds))


def _time(groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None) -> _Time:
    products = [2 * costs.rows * group.factors / costs.flops for group in groups]
    # Of a product the backward has two, or one if there is no gradient of its matrix.
    back = sum(seconds * (2 if group.reduced else 1) for seconds, group in zip(products, groups, strict=True))
    again = sum(choice.seconds for choice in decision.choices if choice.op >= 0) if decision is not None else 0.0
    gathers = sum(_gather(group, group.ranks, costs) for group in groups)
    backward = sum(_gather(group, group.backward_ranks, costs) + _reduction(group, costs) for group in groups)
    if decision is not None and decision.has_large_packs:
        gathers -= SAVED_LATENCIES * costs.latency * sum(_gathers(group, group.ranks, costs) for group in groups)
        backward -= SAVED_LATENCIES * costs.latency * sum(_reductions(group, costs) for group in groups)
    return _Time(_Half(sum(products), gathers), _Half(back + again, backward))


def _with_more_memory(
    groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None, now: _Time
) -> Iterator[tuple[str, _Time]]:
    """A memory budget for everything, or a larger one."""
    packs = sum(_gathers(group, group.ranks, costs) for group in groups)
    saved = SAVED_LATENCIES * costs.latency
    reductions = sum(_reductions(group, costs) for group in groups)
    if decision is None:
        again = [group for group in groups if group.backward_ranks > 1]
        then = now.less(
            forward=saved * packs,
            backward=saved * reductions + sum(_gather(group, group.backward_ranks, costs) for group in again),
        )
        more = sum(group.size for group in again)
        keeps = f"keeps {len(again)} groups unsharded for the backward" if again else "gathers in larger packs"
        yield f'a memory_budget ("auto", or bytes: about {format_mib(more)} more than now) that {keeps}', then
    elif decision.choices:
        groups_again = sum(choice.seconds for choice in decision.choices if choice.group >= 0)
        ops = sum(choice.seconds for choice in decision.choices if choice.op >= 0)
        has_more = not decision.has_large_packs
        then = now.less(
            forward=saved * packs * has_more, backward=groups_again + saved * reductions * has_more, compute=ops
        )
        wide, tight = format_mib(decision.fastest_bytes), format_mib(decision.budget)
        yield f"a memory_budget of {wide} in the place of {tight}", then


def _with_larger_groups(
    groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None, now: _Time
) -> Iterator[tuple[str, _Time]]:
    """Several small groups as one, up to the size at which latency is a third of a gather."""
    if decision is not None and decision.has_large_packs:
        return
    small = [group for group in groups if group.ranks > 1 and group.size // group.ranks < costs.pack_bytes(group.ranks)]
    if len(small) < _FEW_GROUPS:
        return
    ranks = max(group.ranks for group in small)
    sizes = [group.size // group.ranks for group in small]
    left = len(plan_packs(sizes, [False] * len(sizes), costs.pack_bytes(ranks)))
    if left * _FEW_GROUPS > len(small):
        return
    again = sum(group.backward_ranks > 1 for group in small) * (1 - left / len(small))
    fewer = len(small) - left
    trained = sum(bool(group.reduced) for group in small) * (1 - left / len(small))
    then = now.less(forward=costs.latency * fewer, backward=costs.latency * (again + trained))
    yield f"{left} groups in the place of {len(small)} small ones (a policy of compile_fsdp.wrap that takes more)", then


def _gathers(group: GroupFigures, ranks: int, costs: Costs) -> int:
    """How many all-gathers the group takes, as `pack_gathers` has it; 0 over one rank."""
    shards = [size // ranks for size in group.unsharded]
    return len(plan_gathers(shards, ranks, costs.pack_bytes(ranks), costs)) if ranks > 1 else 0


def _reductions(group: GroupFigures, costs: Costs) -> int:
    """How many reduce-scatters the group takes, as `pack_reductions` has it; 0 over one rank."""
    ranks = group.ranks
    return len(plan_reductions(group.reduced, costs.pack_bytes(ranks) * ranks, costs)) if ranks > 1 else 0


def _gather(group: GroupFigures, ranks: int, costs: Costs) -> float:
    return _collectives(_gathers(group, ranks, costs), group.size, ranks, costs)


def _reduction(group: GroupFigures, costs: Costs) -> float:
    return _collectives(_reductions(group, costs), sum(group.reduced), group.ranks, costs)


def _collectives(count: int, size: int, ranks: int, costs: Costs) -> float:
    """Seconds of so many all-gathers or reduce-scatters, of so many unsharded bytes together."""
    return costs.collective(size // ranks, ranks) + (count - 1) * costs.latency if count else 0.0
