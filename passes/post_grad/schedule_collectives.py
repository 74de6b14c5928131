"""Schedule collectives, their waits, and fetches of offloaded tensors.

Precondition  a post-grad graph; collectives whose inputs and results nothing writes
Match         all-gathers and fetches of the graph's inputs, reduce-scatters, and their packs, waits and views
Rewrite       a gather is launched just early enough to arrive in time, within its bounds, and waited for at its first
              use; a fetch likewise, over a separate link; a gradient is reduced as soon as it exists, and waited for
              once it should have arrived
Report        collectives moved, and collectives left in place

    before                                    after
    a = wait_tensor(all_gather(shard_a))      a_ = all_gather(shard_a)
    x = mm(x, a)                              a = wait_tensor(a_)
    b = wait_tensor(all_gather(shard_b))      b_ = all_gather(shard_b)
    x = mm(x, b)                              x = mm(x, a)
                                              b = wait_tensor(b_)
                                              x = mm(x, b)

[Note: Bounds of a prefetch]
A forward gathers no pack before the preceding pack is used, as eager FSDP2's prefetch. A backward launches no gather
before its traced place, which `backward_prefetch` and the modules' prefetch lists decide. Within these bounds a gather
goes as late as the costs allow, because gathered parameters take memory. A gradient in flight keeps its unsharded
memory; all gradients in flight take at most the memory of the largest reduction.

[Note: One order on all ranks]
Ranks may compute with different batches, of several lengths for example, and so take different times. Their collectives
must still be issued in one order. So the order is from a schedule for the batch that all have agreed on (`Costs.rows`),
in which only products with parameters take time. The compute of this rank decides only on the places within that order.

[Note: Who keeps the order]
Inductor lowers the nodes in graph order, and moves kernels afterwards only to save memory. That pass knows nothing of
communication, and is off for our graphs (`backend/compile.py`). All other passes keep the order of collectives, because
Inductor fuses collectives with nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from compile_fsdp.ops import BLOCK_CALLS, reduce_scatter_tensor
from compile_fsdp.passes.analysis.collectives import (
    is_collective,
    is_fetch,
    is_gather,
    is_rearrangement,
    is_reduction,
    is_wait,
    numel,
)
from compile_fsdp.passes.analysis.costs import (
    Costs,
    communication,
    compute_seconds,
    device_costs,
    usual_compute_seconds,
)
from compile_fsdp.passes.analysis.effects import Effects, is_barrier
from compile_fsdp.passes.analysis.step_time import Clock, Link
from compile_fsdp.passes.report import PassCounts


def schedule_collectives(graph: fx.Graph, *, hoist: bool = True, costs: Costs | None = None) -> PassCounts:
    """Schedule the graph's collectives; only its order changes.

    `hoist`: whether a gather may move before its traced place, as in forwards. See [Note: Bounds of a prefetch].
    """
    nodes = len(graph.nodes)
    moves = _Moves(graph)
    moved = moves.gathers + moves.reductions
    if every := moved + moves.fetches:
        costs = costs or device_costs(every[0].collective)
        for each in every:
            each.size, each.seconds = communication(each.collective, costs)
        clock = Clock(compute_seconds(node, costs) for node in moves.fixed)
        _place_reductions(moves.reductions, clock)
        _place_gathers(moves, clock, Clock(_usual_seconds(moves, costs)), hoist)
        _place_fetches(moves, clock)
        _reorder(moves)
    counts = (("collectives_scheduled", len(moved)), ("left_in_place", moves.left))
    return PassCounts(schedule_collectives.__name__, nodes, nodes, counts)


@dataclass(eq=False, slots=True)
class _Collective:
    """One collective and the nodes that move with it. Positions are those of fixed nodes."""

    collective: fx.Node
    launch: list[fx.Node]  # nodes that prepare the collective, which nothing else reads, and the collective last
    results: list[fx.Node]  # the wait, and views and copies of its result, in graph order
    traced: int = 0  # position of the next fixed node in the traced graph
    ready: int = 0  # first position at which its inputs exist
    due: int = 0  # position of its first use
    slot: int = 0  # position at which it is launched
    wait_slot: int = 0  # position of the wait; each result stands there, or later before its own first use
    seconds: float = 0.0
    size: int = 0  # bytes of the gathered, unreduced or fetched tensor


class _Moves:
    """Nodes that move, and nodes that stay."""

    def __init__(self, graph: fx.Graph) -> None:
        effects = Effects(graph.owning_module)
        written = effects.find_written(graph)
        found: list[_Collective] = []
        self.left = 0  # number of collectives and fetches that stay where they are
        moving: set[fx.Node] = set()
        for node in graph.nodes:
            if not (is_gather(node) or is_reduction(node) or is_fetch(node)):
                continue
            each = _Collective(node, _preparations(node), _results(node))
            own = {*each.launch, *each.results}
            near = own.union(*(node.all_input_nodes for node in own), *(node.users for node in own))
            if _is_movable(each, written) and moving.isdisjoint(near):
                found.append(each)
                moving |= own
            else:
                self.left += 1
        # Each kind in graph order.
        self.gathers = [each for each in found if is_gather(each.collective)]
        self.reductions = [each for each in found if is_reduction(each.collective)]
        self.fetches = [each for each in found if is_fetch(each.collective)]
        self.fixed = [node for node in graph.nodes if node not in moving]  # they keep their order
        position = {node: i for i, node in enumerate(self.fixed)}
        stops = [i for i, node in enumerate(self.fixed) if is_barrier(node, effects)]
        for each in found:
            each.traced = bisect_left(self.fixed, each.collective)
            inputs = [i for node in each.launch for i in node.all_input_nodes if i in position]
            each.ready = max((position[node] + 1 for node in inputs), default=0)
            users = [position[user] for node in each.results for user in node.users if user in position]
            each.due = min(users, default=len(self.fixed) - 1)
            # A collective does not change places with an op that may write its inputs.
            stop = bisect_left(stops, each.traced)
            each.ready = max([each.ready, *(i + 1 for i in stops[:stop][-1:])])
            each.due = min([each.due, *stops[stop : stop + 1]])


def _preparations(collective: fx.Node) -> list[fx.Node]:
    """Return the collective, and packs, casts and views for it alone."""
    found = {collective}
    stack = [collective]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found and is_rearrangement(node) and all(user in found for user in node.users):
                found.add(node)
                stack.append(node)
    return sorted(found)


def _results(collective: fx.Node) -> list[fx.Node]:
    """Return the wait, and views and copies that need nothing else."""
    found: set[fx.Node] = set()
    stack = [collective]
    while stack:
        for node in stack.pop().users:
            is_result = is_wait(node) or is_rearrangement(node)
            if node not in found and is_result and all(i in found or i is collective for i in node.all_input_nodes):
                found.add(node)
                stack.append(node)
    return sorted(found)


def _is_movable(each: _Collective, written: set[fx.Node]) -> bool:
    if [is_wait(node) for node in each.collective.users] != [True]:
        return False
    inputs = {node for launched in each.launch for node in launched.all_input_nodes} - set(each.launch)
    if not is_reduction(each.collective) and any(node.op != "placeholder" for node in inputs):
        return False  # It gathers activations, so it is not the runtime's.
    touched = inputs | set(each.launch) | set(each.results) - {each.results[0]}
    return not touched & written


def _usual_seconds(moves: _Moves, costs: Costs) -> Iterator[float]:
    """Yield the seconds of each fixed node for the usual batch. See [Note: One order on all ranks]."""
    parameters = {node for each in moves.gathers for node in each.results}
    # Not of the model's own reductions, whose sizes depend on the rank's batch.
    reductions = [each for each in moves.reductions if each.collective.target is reduce_scatter_tensor]
    gradients = {node for each in reductions for launched in each.launch for node in launched.all_input_nodes}
    for node in moves.fixed:
        involved = [each for each in node.all_input_nodes if each in parameters] + [node] * (node in gradients)
        if node.target in BLOCK_CALLS:  # a product with each parameter, and one for each gradient
            count = sum(map(numel, (*involved, *(item for item in node.users if item in gradients))))
        else:
            count = max(map(numel, involved), default=0)
        yield usual_compute_seconds(node, count, costs)


def _place_gathers(moves: _Moves, clock: Clock, usual: Clock, hoist: bool) -> None:
    traced = sorted({each.traced for each in moves.gathers})
    before = dict(zip(traced, traced[:1] + traced, strict=False))  # where the preceding group was traced
    # See [Note: Bounds of a prefetch].
    own = (max(each.ready, before[each.traced] if hoist else each.traced) for each in moves.gathers)
    earliest = list(accumulate(own, max))  # gathers keep the order in which they were traced
    _place_late(moves.gathers, earliest, [each.due for each in moves.gathers], usual)
    # Positions from which on a gather is launched behind one more collective.
    stay = [i + 1 for i, node in enumerate(moves.fixed) if is_collective(node)]
    others = sorted([each.slot for each in moves.reductions] + stay)
    latest = []
    for i, each in enumerate(moves.gathers):
        behind = bisect_right(others, each.slot)
        earliest[i] = max([earliest[i], *others[:behind][-1:]])
        latest.append(min([each.due, *(other - 1 for other in others[behind:][:1])]))
    _place_late(moves.gathers, earliest, latest, clock)


def _place_fetches(moves: _Moves, clock: Clock) -> None:
    # Ranks may place fetches differently, because the link to its host belongs to one rank alone.
    begin = next(i for i, node in enumerate(moves.fixed) if node.op != "placeholder")
    earliest = list(accumulate((max(each.ready, begin) for each in moves.fetches), max))
    _place_late(moves.fetches, earliest, [each.due for each in moves.fetches], clock)


def _place_late(gathers: list[_Collective], earliest: list[int], latest: list[int], clock: Clock) -> None:
    """Place each gather as late as its bounds allow, one at a time on the link."""
    following = max(latest, default=0)
    free_until = float("inf")
    for each, first, last in reversed(list(zip(gathers, earliest, latest, strict=True))):
        start = min(clock.starts[each.due], free_until) - each.seconds
        each.slot = following = min(max(clock.last_before(start), first), last, following)
        each.wait_slot = each.due
        free_until = start


def _place_reductions(reductions: list[_Collective], clock: Clock) -> None:
    """Place each reduction as early as possible, and its wait where it should have arrived, in the same order.

    A wait stands earlier if it has to bound the gradients in flight.
    """
    for each in reductions:
        each.slot = each.ready
    limit = max((each.size for each in reductions), default=0)
    flying: list[_Collective] = []
    link = Link()
    for each in sorted(reductions, key=lambda each: each.slot):
        while sum(other.size for other in flying) + each.size > limit:
            first = flying.pop(0)
            first.wait_slot = max(min(first.wait_slot, each.slot), first.slot)
        link.send(clock.starts[each.slot], each.seconds)
        each.wait_slot = min(max(clock.first_after(link.free), each.slot + 1), each.due)
        flying.append(each)


def _reorder(moves: _Moves) -> None:
    """Put the nodes that move before the fixed nodes at their positions."""
    position = {node: i for i, node in enumerate(moves.fixed)}
    placed: list[tuple[int, int, fx.Node]] = []  # (position, order within it, node)
    for each in moves.reductions:
        placed += [(each.slot, 1, node) for node in each.launch]
        rank = 0 if each.wait_slot > each.slot else 2
        placed += [(each.wait_slot, rank, node) for node in each.results]
    for each in (*moves.gathers, *moves.fetches):
        placed += [(each.slot, 3, node) for node in each.launch]
        placed += [(slot, 4, node) for node, slot in _first_uses(each, position)]
    placed.sort(key=lambda item: item[:2])
    placed.reverse()  # to pop from its end
    end = moves.fixed[-1]
    # Puts every node before the last, because fx's order keys grow longer with each node moved between two.
    for slot, fixed in enumerate(moves.fixed):
        while placed and placed[-1][0] == slot:
            end.prepend(placed.pop()[2])
        if fixed is not end:
            end.prepend(fixed)


def _first_uses(gather: _Collective, position: dict[fx.Node, int]) -> list[tuple[fx.Node, int]]:
    """Return each result with the position of its first use, none before the wait."""
    first: dict[fx.Node, int] = {}
    for node in reversed(gather.results):
        uses = [position[user] if user in position else first[user] for user in node.users]
        first[node] = min(uses, default=gather.due)
    first[gather.results[0]] = gather.wait_slot
    return [(node, max(first[node], gather.wait_slot)) for node in gather.results]
