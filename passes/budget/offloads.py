"""Which saved activations the link to the host's memory has time for, while the device computes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping

from compile_fsdp.passes.budget.timeline import Timeline


def find_offloads(timeline: Timeline, recomputation: Mapping[int, float]) -> dict[int, float]:
    """By op whose results may be offloaded, the seconds that this adds to the step.

    A result leaves behind its last use in the forward, and the link carries one at a time. It is offered if no other is
    on its way meanwhile, and it has arrived by the end of the forward, which what the graph returns has not. Then the
    backward, which takes longer, has time to fetch it as well. What takes longest to compute again, byte by byte, comes
    first.

    Args:
        timeline: The step.
        recomputation: By op that the backward could run again, what that takes; others cannot be.
    """
    step, costs = timeline.step, timeline.costs
    if not costs.offload_bandwidth:
        return {}
    sizes = {at: sum(value.size for value in made if value.is_saved) for at, made in enumerate(step.made)}
    least = max(timeline.least_offloaded_bytes, 1)
    worth_it = [at for at, size in sizes.items() if size >= least]
    worth_it.sort(key=lambda at: (-recomputation.get(at, math.inf) / sizes[at], at))
    found: dict[int, float] = {}
    taken: list[tuple[float, float]] = []  # when the link is busy: disjoint, in order
    for at in worth_it:
        start = timeline.leaves_at(at)
        end = start + costs.transfer(sizes[at])
        i = bisect_left(taken, (start, end))
        is_free = (i == 0 or taken[i - 1][1] <= start) and (i == len(taken) or end <= taken[i][0])
        if is_free and end <= timeline.forward_seconds:
            insort(taken, (start, end))
            # Two copies are launched, and take the bandwidth of the device's own memory.
            found[at] = 2 * costs.latency + costs.copy(sizes[at])
    return found
