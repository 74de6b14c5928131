"""Decide which gradients share a reduce-scatter.

Precondition  packed reduce-scatters, see `collectives.py`; their results are returned parameter by parameter
Match         gradients whose copy into the pack costs more than a separate collective; packs of more bytes than
              `Costs.pack_bytes`; with `merge`, packs of several groups
Rewrite       such a gradient gets its own reduce-scatter, from where it lies; `plan_reductions` packs the rest
Report        reductions before and after; gradients that are reduced by themselves; bytes no longer copied

    before                                                  after
    packed = cat([reshape(wide, [ranks, -1]), ...], 1)      %0 = reduce_scatter_tensor(reshape(wide, [-1]))
    %0 = reduce_scatter_tensor(reshape(packed, [-1]))       return wait_tensor(%0), ...
    parts = split_with_sizes_copy(wait_tensor(%0), ...)
    return parts[0], ...

A gradient that waits for its pack to fill keeps its unsharded memory: at most `Costs.pack_bytes` per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_fsdp.passes.analysis.collectives import RESHAPES, Packed, aten, insert, is_reduction, numel
from compile_fsdp.passes.analysis.costs import Costs, plan_reductions
from compile_fsdp.passes.post_grad.packing import Kind, Merge, Part, Writes, join, launch, pack_anew, split
from compile_fsdp.passes.report import PassCounts


def pack_reductions(graph: fx.Graph, *, merge: Merge = Merge.NONE, costs: Costs | None = None) -> PassCounts:
    """Pack the graph's reduce-scatters anew; with `merge`, also those of several groups together."""
    return pack_anew(graph, _REDUCTIONS, merge, _may_join, costs)


def _may_join(writes: Writes, earlier: Packed, later: Packed) -> bool:
    # The earlier gradients wait for the later gradients: unchanged, and with no reader of their results before.
    readers = (user for item in earlier.outputs if item is not None for user in item.users)
    is_unread = all(reader > later.pack for reader in readers)
    return is_unread and writes[earlier.pack] == writes[later.pack]


def _reduce(place: Packed, pack: Sequence[Part]) -> dict[fx.Node, fx.Node]:
    """Reduce a pack by the ops of `place` from pack to split."""
    graph = place.pack.graph
    result = insert(graph, aten.reshape.default, join(pack, 1, like=place.pack), [-1], like=place.pack)
    for node in (*place.before, place.collective, *place.after):
        if node is place.collective:
            result = launch(result, pack, like=node)
        elif node.target not in RESHAPES:
            assert callable(node.target)
            args = tuple(result if isinstance(each, fx.Node) else each for each in node.args)
            result = insert(graph, node.target, *args, like=node, **node.kwargs)
    numels = [numel(part.sent) // place.ranks for part in pack]
    return split(result, pack, numels, 0)


_REDUCTIONS = Kind(
    pack_reductions.__name__,
    ("reductions_packed_anew", "now", "reduced_alone", "bytes_not_copied"),
    is_reduction,
    plan_reductions,
    copies=lambda ranks: 1,
    place=lambda run: run[-1],
    collect=_reduce,
)
