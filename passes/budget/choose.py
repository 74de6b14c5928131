"""Which groups stay unsharded, which ops the backward runs again and whose results leave the device, within a budget.

Every choice takes some seconds and frees some bytes. Beginning with the fastest step, which keeps and saves everything,
choices are made in one order, those with the fewest seconds per byte first, until the step fits. The order does not
depend on the budget: a step with more memory makes the first of these choices, and is never slower by the estimate.

Source: the ratio is that of DeepCompile's selective unsharding (arXiv 2504.09983), here for recomputation as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from compile_fsdp.passes.analysis.module_names import module_fqn
from compile_fsdp.passes.budget.offloads import find_offloads
from compile_fsdp.passes.budget.op_facts import Kind
from compile_fsdp.passes.budget.step_memory import Group
from compile_fsdp.passes.budget.timeline import Choices, Timeline
from compile_fsdp.torch_compat.dynamo import is_recomputation_settled

# Of the latencies of all packs, what larger ones save.
SAVED_LATENCIES = 3 / 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to save memory.

    Attributes:
        seconds: What it adds to the step, by the estimate.
        size: Bytes that are not held between forward and backward.
        group: What is gathered again, or -1.
        op: Position of the op that the backward runs again, or -1. Neither: packs stay small.
        name: What is gathered, run again or offloaded, and in which module.
        is_offload: Whether the op is not run again: its results are in the host's memory meanwhile.
    """

    seconds: float
    size: int
    group: int = -1
    op: int = -1
    name: str = ""
    is_offload: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How a step fits into its budget.

    Attributes:
        choices: What it does; all that saves memory if it does not fit.
        fits: Whether it does.
        peak: Most bytes that it allocates, by the estimate.
        fastest: Most bytes of the step that keeps and saves everything.
        made: The choices that were made, in their order.
    """

    choices: Choices
    fits: bool
    peak: int
    fastest: int
    made: tuple[Choice, ...]


def fit(timeline: Timeline, budget: int) -> Fit:
    """Make as few choices as a budget allows.

    Args:
        timeline: The step.
        budget: Most bytes above the sharded state.
    """
    ordered = sorted(find_choices(timeline), key=lambda each: (each.seconds / each.size, each.op))
    keepable = frozenset(group.number for group in timeline.step.groups if _is_keepable(group))

    def choices_of(count: int) -> Choices:
        made = ordered[:count]
        return Choices(
            kept=keepable - {each.group for each in made},
            recomputed=frozenset(each.op for each in made if each.op >= 0 and not each.is_offload),
            has_large_packs=all(each.op >= 0 or each.group >= 0 for each in made),
            offloaded=frozenset(each.op for each in made if each.is_offload),
        )

    fastest = timeline.peak(choices_of(0))
    fewest, most = 0, len(ordered) if fastest > budget else 0
    while fewest < most:
        middle = (fewest + most) // 2
        if timeline.peak(choices_of(middle)) <= budget:
            most = middle
        else:
            fewest = middle + 1
    choices = choices_of(fewest)
    peak = timeline.peak(choices)
    return Fit(choices, peak <= budget, peak, fastest, tuple(ordered[:fewest]))


def find_choices(timeline: Timeline) -> Iterator[Choice]:
    """All that a step may do to save memory."""
    step, costs = timeline.step, timeline.costs
    if timeline.large_pack_bytes:
        yield Choice(SAVED_LATENCIES * timeline.packs * costs.latency, timeline.large_pack_bytes, name="smaller packs")
    for group in step.groups:
        if _is_keepable(group):
            gather = costs.collective(group.size // timeline.ranks, timeline.ranks)
            yield Choice(gather, group.size, group=group.number, name=f"gather {group.name} again")
    saved = [sum(value.size for value in made if value.is_saved) for made in step.made]
    recomputation = _find_recomputation(timeline, [size + step.internal[at] for at, size in enumerate(saved)])
    offloads = find_offloads(timeline, recomputation)
    for at in sorted(recomputation.keys() | offloads.keys()):
        again, away, name = recomputation.get(at, math.inf), offloads.get(at, math.inf), _name_of(step.ops[at])
        # What an op saves besides its results stays where it is when these leave.
        again_size = saved[at] + step.internal[at]
        if again / again_size <= away / max(saved[at], 1):
            yield Choice(again, again_size, op=at, name=f"run {name} again")
        else:
            yield Choice(away, saved[at], op=at, name=f"offload {name}", is_offload=True)


def _name_of(op: fx.Node) -> str:
    module = module_fqn(op)
    return f"{op.name} of {module}" if module else op.name


def _find_recomputation(timeline: Timeline, sizes: Sequence[int]) -> dict[int, float]:
    """By op that may run again in the backward, and saves so many bytes, the seconds that it takes."""
    found = ((at, _recomputation(timeline, at)) for at, size in enumerate(sizes) if size)
    return {at: seconds for at, seconds in found if seconds is not None}


def _is_keepable(group: Group) -> bool:
    is_gathered_again = bool(group.frees and group.size) and group.unshards_in_backward
    return is_gathered_again and all(parameter.fills == 1 for parameter in group.parameters)


def _recomputation(timeline: Timeline, at: int) -> float | None:
    """Seconds that it takes to run an op again in the backward; None if that is not possible.

    What it computes with is saved, or computed again by cheap ops, while the parameters of the same module are there.
    """
    step, windows = timeline.step, timeline.step.windows
    window = windows[at]
    if not step.facts[at].is_repeatable or is_recomputation_settled(step.ops[at]):
        return None
    for value in step.made[at]:
        # What another module reads is where its own recomputation begins.
        if any(windows[each] is not window for each in (*value.uses, *value.saved_by)) or value.is_result:
            return None
    seconds, stack, seen = 0.0, [at], {at}
    while stack:
        op = stack.pop()
        if op == at or step.facts[op].kind is Kind.HEAVY:  # else it is computed together with what reads it
            seconds += timeline.seconds[op]
        if any(group.frees and not (group is window and group.unshards_in_backward) for group in step.read[op]):
            return None
        for source in {source for value in step.made[op] for source in value.sources}:
            if source.is_at_hand or source.made_at in seen:
                continue
            if windows[source.made_at] is not window or not step.facts[source.made_at].is_repeatable:
                return None
            seen.add(source.made_at)
            stack.append(source.made_at)
    return seconds
