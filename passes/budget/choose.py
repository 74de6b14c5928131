"""Choose kept groups, recomputed ops and offloaded results within a budget.

Every choice costs seconds and frees bytes. The fastest step keeps and saves everything. From there, choices are made in
the order of their seconds per byte, lowest first, until the step fits. The order does not depend on the budget, so a
step with more memory makes the first of these choices, and by the estimate it is never slower.

Source: the ratio is from DeepCompile's selective unsharding (arXiv 2504.09983), applied to recomputation as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compile_fsdp.passes.analysis.module_names import module_fqn
from compile_fsdp.passes.budget.op_facts import Kind
from compile_fsdp.passes.budget.step_memory import Choices, Group, Step
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.torch_compat.dynamo import recomputation

# Share of all packs' latencies that larger packs save.
SAVED_LATENCIES = 3 / 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to save memory."""

    seconds: float  # that it adds to the step, by the estimate
    size: int  # bytes that are not held between forward and backward
    group: int = -1  # number of the group that is gathered again, or -1
    op: int = -1  # position of the op that is run again or offloaded, or -1; if `group` is -1 as well, packs stay small
    name: str = ""  # description with the op or group and its module, for reports
    is_offload: bool = False  # the op's results wait in host memory; if False, the op is run again


@dataclass(frozen=True, slots=True)
class Fit:
    """How a step fits into its budget."""

    choices: Choices  # all choices that save memory if the step does not fit
    fits: bool
    peak: int  # most bytes that the step allocates, by the estimate
    fastest: int  # most bytes of the step that keeps and saves everything
    made: tuple[Choice, ...]  # in order


def fit(timeline: Timeline, budget: int) -> Fit:
    """Make as few choices as the budget allows, which bounds the bytes above the sharded state."""
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
    fewest = 0
    if fastest > budget:
        counts = range(len(ordered))
        fewest = bisect_left(counts, True, key=lambda count: timeline.peak(choices_of(count)) <= budget)
    choices = choices_of(fewest)
    peak = timeline.peak(choices)
    return Fit(choices, peak <= budget, peak, fastest, tuple(ordered[:fewest]))


def find_choices(timeline: Timeline) -> Iterator[Choice]:
    """Yield all choices of a step that save memory."""
    step, costs, parameters = timeline.step, timeline.costs, timeline.parameters
    if parameters.large_pack_bytes:
        saved_seconds = SAVED_LATENCIES * parameters.packs * costs.latency
        yield Choice(saved_seconds, parameters.large_pack_bytes, name="smaller packs")
    for group in step.groups:
        if _is_keepable(group):
            gather = costs.collective(group.size // timeline.ranks, timeline.ranks)
            yield Choice(gather, group.size, group=group.number, name=f"gather {group.name} again")
    saved = [sum(value.size for value in made if value.is_saved) for made in step.made]
    sizes = [size + step.internal[at] for at, size in enumerate(saved)]
    again = {at: ops_run_again(step, at) for at, size in enumerate(sizes) if size}
    seconds = {  # ops that run again for a later op are fused with their readers, unless they are heavy
        at: sum(timeline.seconds[op] for op in ops if op == at or step.facts[op].kind is Kind.HEAVY)
        for at, ops in again.items()
        if ops
    }
    offloads = find_offloads(timeline, seconds)
    for at in sorted(seconds.keys() | offloads.keys()):
        rerun, away, module = seconds.get(at, math.inf), offloads.get(at, math.inf), module_fqn(step.ops[at])
        name = f"{step.ops[at].name} of {module}" if module else step.ops[at].name
        # Only the results of an op leave the device; its internal saved bytes stay.
        if rerun / sizes[at] <= away / max(saved[at], 1):
            yield Choice(rerun, sizes[at], op=at, name=f"run {name} again")
        else:
            yield Choice(away, saved[at], op=at, name=f"offload {name}", is_offload=True)


def find_offloads(timeline: Timeline, recomputations: Mapping[int, float]) -> dict[int, float]:
    """Map each op with offloaded results to the seconds that this adds.

    A result leaves behind its last use in the forward, and the link carries one result at a time. A result is chosen if
    the link is free meanwhile, and if the copy arrives by the end of the forward. A result that the graph returns
    leaves too late. The backward takes longer than the forward, so it has time for the fetch. Results that take longest
    to recompute per byte come first; `recomputations` has the seconds of each op that the backward could run again.
    """
    step, costs = timeline.step, timeline.costs
    if not costs.offload_bandwidth:
        return {}
    sizes = {at: sum(value.size for value in made if value.is_saved) for at, made in enumerate(step.made)}
    least = max(timeline.least_offloaded_bytes, 1)
    worth_it = [at for at, size in sizes.items() if size >= least]
    worth_it.sort(key=lambda at: (-recomputations.get(at, math.inf) / sizes[at], at))
    found: dict[int, float] = {}
    taken: list[tuple[float, float]] = []  # (start, end) seconds in which the link is busy: disjoint, in order
    for at in worth_it:
        start = timeline.leaves_at(at)
        end = start + costs.transfer(sizes[at])
        i = bisect_left(taken, (start, end))
        is_free = (i == 0 or taken[i - 1][1] <= start) and (i == len(taken) or end <= taken[i][0])
        if is_free and end <= timeline.forward_seconds:
            insort(taken, (start, end))
            # Two copies are launched, and take bandwidth of the device's memory.
            found[at] = 2 * costs.latency + costs.copy(sizes[at])
    return found


def _is_keepable(group: Group) -> bool:
    is_gathered_again = bool(group.frees and group.size) and group.unshards_in_backward
    return is_gathered_again and all(parameter.fills == 1 for parameter in group.parameters)


def ops_run_again(step: Step, at: int) -> set[int]:
    """Return the ops that run if an op runs again; empty if it cannot.

    Inputs that the backward does not have are computed again, too. All these ops must lie in one window, and may read
    only parameters that are gathered there or that the forward does not free.
    """
    windows, impossible = step.windows, set[int]()
    window = windows[at]
    if not step.facts[at].is_repeatable or recomputation(step.ops[at]) is not None:
        return impossible
    for value in step.made[at]:
        # Recomputation in a different window begins with its inputs, so a value read there stays.
        if any(windows[each] is not window for each in (*value.uses, *value.saved_by)) or value.is_result:
            return impossible
    stack, seen = [at], {at}
    while stack:
        op = stack.pop()
        if any(group.frees and not (group is window and group.unshards_in_backward) for group in step.read[op]):
            return impossible
        for source in {source for value in step.made[op] for source in value.sources}:
            if source.is_at_hand or source.made_at in seen:
                continue
            if windows[source.made_at] is not window or not step.facts[source.made_at].is_repeatable:
                return impossible
            seen.add(source.made_at)
            stack.append(source.made_at)
    return seen
