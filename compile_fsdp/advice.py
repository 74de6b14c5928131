"""Estimate changes that make a compiled step faster, from its group sizes and the device's costs.

[Note: Two estimates of a step]
Communication overlaps with compute to a degree that is unknown before a run. So a step has two estimates. In the hidden
estimate, communication and compute overlap fully, and a half (forward or backward) takes as long as the longer of the
two. In the exposed estimate nothing overlaps. The gain of a change lies between its gains by the two estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_fsdp.passes.analysis.costs import Costs, plan_gathers, plan_packs, plan_reductions
from compile_fsdp.passes.budget.choose import SAVED_LATENCIES
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.text import count, format_bytes

# Share of a step's time below which a gain is not reported, because the estimate's error may be larger.
LEAST_SHARE = 0.02

# Larger groups are advised if there are at least this many small groups for each larger group.
_FEW_GROUPS = 2


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Sizes of a forward graph's parameter group, on which a step's time depends."""

    name: str  # FQN of its module
    unsharded: tuple[int, ...]  # (parameters,) bytes of each unsharded parameter
    reduced: tuple[int, ...]  # (trained parameters,) bytes of each gradient before it is reduced
    factors: int  # number of elements in parameters with two or more dims, embeddings included
    ranks: int  # number of ranks that the group is sharded over
    backward_ranks: int  # number of ranks of the backward's all-gather; 1 if the backward gathers nothing of the group

    @property
    def size(self) -> int:
        """Bytes of all its parameters, unsharded."""
        return sum(self.unsharded)


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that makes steps faster, by the estimate."""

    change: str  # in words, as the subject of a sentence
    least_seconds: float  # saved per step in the hidden estimate
    most_seconds: float  # saved per step in the exposed estimate
    step_seconds: float  # of the present step in the exposed estimate

    def __str__(self) -> str:
        most, step = self.most_seconds * 1e3, self.step_seconds * 1e3
        least = f"{self.least_seconds * 1e3:.3g} to " if self.least_seconds > 0.05 * self.most_seconds else "up to "
        least = "" if self.least_seconds > 0.95 * self.most_seconds else least
        takes = f"whose matrix products and collectives take about {step:.3g} ms"
        return f"estimated: {self.change} would take {least}{most:.3g} ms off a forward and its backward, {takes}"

    @property
    def sentence(self) -> str:
        """The advice as a full sentence, with capital letter and full stop."""
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds of compute and communication in a step. See [Note: Two estimates of a step]."""

    forward: tuple[float, float]  # compute, communication
    backward: tuple[float, float]

    @property
    def hidden(self) -> float:
        return max(self.forward) + max(self.backward)

    @property
    def exposed(self) -> float:
        return sum(self.forward) + sum(self.backward)

    def less(self, *, forward: float = 0.0, backward: float = 0.0, compute: float = 0.0) -> _Time:
        """Subtract communication from each half, and compute from the backward."""
        (forward_compute, gathers), (backward_compute, others) = self.forward, self.backward
        return _Time((forward_compute, gathers - forward), (backward_compute - compute, others - backward))


def advise(groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None) -> tuple[Advice, ...]:
    """Advise changes that gain at least `LEAST_SHARE` of a step, largest gain first.

    The costs have the batch's rows. The decision is None without a memory budget.
    """
    now = _time(groups, costs, decision)
    changes = [*_with_more_memory(groups, costs, decision, now), *_with_larger_groups(groups, costs, decision, now)]
    found = (Advice(text, now.hidden - then.hidden, now.exposed - then.exposed, now.exposed) for text, then in changes)
    worth = [each for each in found if each.most_seconds >= LEAST_SHARE * each.step_seconds]
    return tuple(sorted(worth, key=lambda each: -each.most_seconds))


def _time(groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None) -> _Time:
    products = [2 * costs.rows * group.factors / costs.flops for group in groups]
    # For each matmul of the forward the backward runs two, or one if the weight has no gradient.
    back = sum(seconds * (2 if group.reduced else 1) for seconds, group in zip(products, groups, strict=True))
    again = sum(choice.seconds for choice in decision.choices if choice.op >= 0) if decision is not None else 0.0
    gathers = sum(_gather(group, group.ranks, costs) for group in groups)
    backward = sum(_gather(group, group.backward_ranks, costs) + _reduction(group, costs) for group in groups)
    now = _Time((sum(products), gathers), (back + again, backward))
    if decision is None or not decision.has_large_packs:
        return now
    forward_saved, backward_saved = _saved_by_large_packs(groups, costs)
    return now.less(forward=forward_saved, backward=backward_saved)


def _saved_by_large_packs(groups: Sequence[GroupFigures], costs: Costs) -> tuple[float, float]:
    """Seconds of latency that large packs save in the forward and in the backward."""
    saved = SAVED_LATENCIES * costs.latency
    packs = sum(_gathers(group, group.ranks, costs) for group in groups)
    return saved * packs, saved * sum(_reductions(group, costs) for group in groups)


def _with_more_memory(
    groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None, now: _Time
) -> Iterator[tuple[str, _Time]]:
    """Advise a memory budget, or a larger memory budget."""
    forward_saved, backward_saved = _saved_by_large_packs(groups, costs)
    if decision is None:
        again = [group for group in groups if group.backward_ranks > 1]
        gathers = sum(_gather(group, group.backward_ranks, costs) for group in again)
        then = now.less(forward=forward_saved, backward=backward_saved + gathers)
        more = sum(group.size for group in again)
        keeps = f"keeps {count(len(again), 'group')} unsharded for the backward" if again else "gathers in larger packs"
        yield f'a memory_budget ("auto", or bytes: about {format_bytes(more)} more than now) that {keeps}', then
    elif decision.choices:
        gathers = sum(choice.seconds for choice in decision.choices if choice.group >= 0)
        ops = sum(choice.seconds for choice in decision.choices if choice.op >= 0)
        if decision.has_large_packs:
            forward_saved = backward_saved = 0.0
        then = now.less(forward=forward_saved, backward=gathers + backward_saved, compute=ops)
        wide, tight = format_bytes(decision.fastest_bytes), format_bytes(decision.budget)
        yield f"a memory_budget of {wide} in the place of {tight}", then


def _with_larger_groups(
    groups: Sequence[GroupFigures], costs: Costs, decision: BudgetDecision | None, now: _Time
) -> Iterator[tuple[str, _Time]]:
    """Advise to merge small groups, up to the size at which latency is a third of an all-gather.

    Without a budget, `pack_gathers` and `pack_reductions` merge them; with memory for large packs, too.
    """
    if decision is None or decision.has_large_packs:
        return
    small = [group for group in groups if group.ranks > 1 and group.size // group.ranks < costs.pack_bytes(group.ranks)]
    if len(small) < _FEW_GROUPS:
        return
    ranks = max(group.ranks for group in small)
    sizes = [group.size // group.ranks for group in small]
    left = len(plan_packs(sizes, [False] * len(sizes), costs.pack_bytes(ranks)))
    if left * _FEW_GROUPS > len(small) or len(groups) - len(small) + left == 1:
        return  # too few to gain from, or one group, which is gathered before anything is computed
    again = sum(group.backward_ranks > 1 for group in small) * (1 - left / len(small))
    fewer = len(small) - left
    trained = sum(bool(group.reduced) for group in small) * (1 - left / len(small))
    then = now.less(forward=costs.latency * fewer, backward=costs.latency * (again + trained))
    fewer_groups = f"{count(left, 'group')} in the place of {len(small)} small ones"
    yield f"{fewer_groups} (a policy of compile_fsdp.wrap that takes more)", then


def _gathers(group: GroupFigures, ranks: int, costs: Costs) -> int:
    """The number of all-gathers that `pack_gathers` makes for a group; 0 over one rank."""
    shards = [size // ranks for size in group.unsharded]
    return len(plan_gathers(shards, ranks, costs)) if ranks > 1 else 0


def _reductions(group: GroupFigures, costs: Costs) -> int:
    """The number of reduce-scatters that `pack_reductions` makes for a group; 0 over one rank."""
    return len(plan_reductions(group.reduced, group.ranks, costs)) if group.ranks > 1 else 0


def _gather(group: GroupFigures, ranks: int, costs: Costs) -> float:
    return costs.collectives(_gathers(group, ranks, costs), group.size // ranks, ranks)


def _reduction(group: GroupFigures, costs: Costs) -> float:
    return costs.collectives(_reductions(group, costs), sum(group.reduced) // group.ranks, group.ranks)
