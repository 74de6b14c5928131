"""Decide which gradients share a reduce-scatter.

Precondition  packed reduce-scatters, see `collectives.py`; their results are returned parameter by parameter
Match         gradients whose copy into the pack costs more than a separate collective; packs of more bytes than
              `Costs.pack_bytes`; with `merge`, packs of several groups
Rewrite       such a gradient gets its own reduce-scatter, from where it lies; `plan_reductions` packs the remaining
              gradients
Report        reductions before and after; gradients that are reduced by themselves; bytes no longer copied

    before                                                  after
    packed = cat([reshape(wide, [ranks, -1]), ...], 1)      %0 = reduce_scatter_tensor(reshape(wide, [-1]))
    %0 = reduce_scatter_tensor(reshape(packed, [-1]))       return wait_tensor(%0), ...
    parts = split_with_sizes(wait_tensor(%0), ...)
    return parts[0], ...

A gradient that waits for its pack to fill keeps its unsharded memory: at most `Costs.pack_bytes` per rank.
"""

from __future__ import annotations

import operator
from functools import partial

from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes.analysis.collectives import (
    RESHAPES,
    Packed,
    Places,
    are_merged,
    aten,
    find_packed,
    insert,
    is_reduction,
    joinable,
    launch,
    numel,
    positions,
    replace_uses,
)
from compile_fsdp.passes.analysis.costs import Costs, are_contiguous, device_costs, plan_reductions, size_bytes
from compile_fsdp.passes.report import PassCounts


def pack_reductions(graph: fx.Graph, *, merge: bool = False, costs: Costs | None = None) -> PassCounts:
    """Pack the graph's reduce-scatters anew.

    Args:
        graph: A post-grad graph.
        merge: Whether packs of several groups may be joined.
        costs: Costs to decide by. None: the built-in costs of the graph's device.
    """
    nodes_before = len(graph.nodes)
    before = after = alone = copied = 0
    replaced: dict[fx.Node, fx.Node] = {}
    obsolete: list[Packed] = []
    may_join = partial(_may_join, Places(graph)) if merge else None
    for run in joinable(find_packed(graph, is_reduction), may_join):
        gradients = [rows for packed in run for rows in packed.inputs]
        sizes = [size_bytes(rows) for rows in gradients]
        own = costs or device_costs(run[0].collective)
        limit = own.pack_bytes(run[0].ranks, is_spare=merge) * run[0].ranks
        packs = _plan(gradients, sizes, own, limit)
        if packs == positions(run):
            continue
        replaced |= _pack(graph, run, packs)
        obsolete += run
        single = [pack[0] for pack in packs if len(pack) == 1]
        before += len(run)
        after += len(packs)
        alone += len(single)
        copied += sum(sizes[i] for i in single)
    replace_uses(replaced)
    for packed in obsolete:
        packed.erase()
    counts = (
        ("reductions_packed_anew", before),
        ("now", after),
        ("reduced_alone", alone),
        ("bytes_not_copied", copied),
    )
    return PassCounts(pack_reductions.__name__, nodes_before, len(graph.nodes), counts)


def _may_join(places: Places, earlier: Packed, later: Packed) -> bool:
    """Return whether the earlier gradients may be reduced with the later gradients.

    They must be unchanged until then, and no node before may read their results.
    """
    readers = (user for item in earlier.outputs if item is not None for user in item.users)
    if not all(places.is_behind(reader, later.pack) for reader in readers):
        return False
    return not places.is_written_between(earlier.pack, later.pack)


def _plan(gradients: list[fx.Node], sizes: list[int], costs: Costs, limit: int) -> list[list[int]]:
    if not are_contiguous(gradients):
        return [list(range(len(sizes)))]
    return plan_reductions(sizes, limit, costs)


def _pack(graph: fx.Graph, run: list[Packed], packs: list[list[int]]) -> dict[fx.Node, fx.Node]:
    """Return the replacement of each item of the old packs."""
    last = run[-1]
    gradients = [rows for packed in run for rows in packed.inputs]
    outputs = [output for packed in run for output in packed.outputs]
    owners = [packed for packed in run for _ in packed.inputs]
    replacements: list[tuple[fx.Node | None, fx.Node]] = []
    with graph.inserting_before(last.pack):
        for pack in packs:
            rows, sources = [gradients[i] for i in pack], [owners[i] for i in pack]
            join = ops.cat if are_merged(sources) else aten.cat.default
            joined = rows[0] if len(pack) == 1 else insert(graph, join, rows, 1, like=last.pack)
            flat = insert(graph, aten.reshape.default, joined, [-1], like=last.pack)
            reduced = _reduce(graph, last, flat, sources)
            if len(pack) == 1:
                replacements.append((outputs[pack[0]], reduced))
                continue
            numels = [numel(each) // last.ranks for each in rows]
            split = insert(graph, aten.split_with_sizes.default, reduced, numels, like=reduced)
            for position, i in enumerate(pack):
                item = insert(graph, operator.getitem, split, position, like=reduced)
                replacements.append((outputs[i], item))
    return {old: new for old, new in replacements if old is not None}


def _reduce(graph: fx.Graph, packed: Packed, flat: fx.Node, sources: list[Packed]) -> fx.Node:
    """Reduce `flat` by the ops of `packed` from pack to split.

    `sources`: the collectives that were to reduce the parts of `flat`.
    """
    result = flat
    for node in (*packed.before, packed.collective, *packed.after):
        if node is packed.collective:
            result = launch(graph, result, sources, like=node)
        elif node.target not in RESHAPES:
            assert callable(node.target)
            args = tuple(result if isinstance(each, fx.Node) else each for each in node.args)
            result = insert(graph, node.target, *args, like=node, **node.kwargs)
    return result
