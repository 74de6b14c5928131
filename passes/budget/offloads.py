"""Choose activations that the link to host memory carries during compute."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping

from compile_fsdp.passes.budget.timeline import Timeline


def find_offloads(timeline: Timeline, recomputation: Mapping[int, float]) -> dict[int, float]:
    """Map each op with offloaded results to the seconds that this adds.

    A result leaves behind its last use in the forward, and the link carries one result at a time. A result is chosen if
    the link is free meanwhile, and if the copy arrives by the end of the forward. A result that the graph returns
    leaves too late. The backward takes longer than the forward, so it has time for the fetch. Results that take longest
    to recompute per byte come first; `recomputation` has the seconds of each op that the backward could run again.
    """
    step, costs = timeline.step, timeline.costs
    if not costs.offload_bandwidth:
        return {}
    sizes = {at: sum(value.size for value in made if value.is_saved) for at, made in enumerate(step.made)}
    least = max(timeline.least_offloaded_bytes, 1)
    worth_it = [at for at, size in sizes.items() if size >= least]
    worth_it.sort(key=lambda at: (-recomputation.get(at, math.inf) / sizes[at], at))
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
