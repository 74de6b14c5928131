"""Keep gathered parameters from the forward to the backward, as far as a budget of memory allows.

Precondition  a forward graph, as Dynamo has traced it
Match         groups whose parameters are each filled once and freed once
Rewrite       the resize(0) of the chosen groups' parameters go; the backward then finds these unsharded
Report        the chosen groups

    before                                    after
    resize_storage_bytes_(weight, 16)         resize_storage_bytes_(weight, 16)
    copy_(weight, gathered)                   copy_(weight, gathered)
    y = linear(x, weight)                     y = linear(x, weight)
    resize_storage_bytes_(weight, 0)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import fx

from compile_fsdp.passes.analysis.costs import Costs, device_costs
from compile_fsdp.passes.analysis.effects import get_argument, is_copy, is_resize
from compile_fsdp.passes.analysis.layout import get_size, is_zero, size_hint


def keep_unsharded(
    graph: fx.Graph, groups: Mapping[fx.Node, Hashable], ranks: int, budget: int | None, costs: Costs | None = None
) -> list[Hashable]:
    """Take out the frees of the groups that are worth their memory; see `choose_kept`.

    Args:
        graph: The graph, with fake values under meta["example_value"].
        groups: By unsharded parameter, its group.
        ranks: That the parameters are sharded over.
        budget: Most bytes of unsharded parameters at a time; None to keep no group.
        costs: Those of the device the graph runs on, unless given.
    Returns:
        The chosen groups, in the order in which they are freed.
    """
    if budget is None:
        return []
    fills: dict[fx.Node, int] = {}
    sizes: dict[fx.Node, int] = {}
    frees: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        if not (is_resize(node) or is_copy(node)):
            continue
        parameter = get_argument(node, 0, "variable" if is_resize(node) else "tensor")
        if not isinstance(parameter, fx.Node) or parameter not in groups:
            continue
        if is_copy(node):
            fills[parameter] = fills.get(parameter, 0) + 1
        elif is_zero(size := get_size(get_argument(node, 1, "new_size"))):
            frees.setdefault(groups[parameter], []).append(node)
        else:
            sizes[parameter] = size_hint(size)
    often = {groups[parameter] for parameter, count in fills.items() if count > 1}
    candidates = [group for group in frees if group not in often]
    total: dict[Hashable, int] = dict.fromkeys(candidates, 0)
    for parameter, size in sizes.items():
        if groups[parameter] in total:
            total[groups[parameter]] += size
    if not candidates:
        return []
    costs = costs or device_costs(next(iter(groups)))
    chosen = choose_kept([total[group] for group in candidates], ranks, budget, costs)
    for i in chosen:
        for node in frees[candidates[i]]:
            graph.erase_node(node)
    return [candidates[i] for i in chosen]


def choose_kept(sizes: Sequence[int], ranks: int, budget: int, costs: Costs) -> list[int]:
    """Which groups to keep from the forward to the backward.

    Args:
        sizes: (n,) bytes of each group's unsharded parameters, equal on all ranks, in the order of the forward.
        ranks: That they are sharded over.
        budget: Most bytes of unsharded parameters at a time. Of groups that are not kept, two neighbours may be there
            at once.
        costs: What gathering them again costs.
    Returns:
        (k,) positions, ascending.
    Source: selective unsharding of DeepCompile (arXiv 2504.09983): the most seconds saved per byte first. Among equals
    the last, whose values lie in memory for the shortest time.
    """

    def saved(i: int) -> float:
        return costs.collective(sizes[i] // ranks, ranks) / max(sizes[i], 1)

    kept: set[int] = set()
    for i in sorted(range(len(sizes)), key=lambda i: (-saved(i), -i)):
        if _held(sizes, kept | {i}) <= budget:
            kept.add(i)
    return sorted(kept)


def _held(sizes: Sequence[int], kept: set[int]) -> int:
    passing = [size for i, size in enumerate(sizes) if i not in kept]
    pairs = [sum(passing[i : i + 2]) for i in range(len(passing))]
    return sum(sizes[i] for i in kept) + max(pairs, default=0)
