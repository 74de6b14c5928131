"""Decide which parameters share an all-gather.

Precondition  packed all-gathers, see `collectives.py`
Match         shards whose copies into and out of the pack cost more than a separate collective; packs of more bytes
              than `Costs.pack_bytes`; with `merge`, packs of several groups
Rewrite       such a shard gets its own all-gather, straight from the shard and into the parameter's own buffer;
              `plan_packs` packs the remaining shards
Report        gathers before and after; parameters gathered by themselves; bytes no longer copied

    before                                    after
    packed = cat([wide, narrow])              %0 = wait_tensor(all_gather_into_tensor(wide))
    %0 = wait_tensor(all_gather...(packed))   w = reshape(reshape(%0, [ranks, -1]), [8, 4])
    rows = reshape(%0, [ranks, -1])           %1 = wait_tensor(all_gather_into_tensor(narrow))
    parts = split_with_sizes_copy(rows, ...)  n = reshape(reshape(%1, [ranks, -1]), [4])
    w = reshape(parts[0], [8, 4])
    n = reshape(parts[1], [4])

[Note: Who pays for a merged pack]
An early gather holds memory until its value is used. Without a budget (`Merge.SMALL`) a pack of several groups is so
small that latency is half of its time, and raises the peak by at most its size. With a budget for everything
(`Merge.ALL`) a pack is larger, but takes only parameters that stay unsharded: they all exist at the end of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import fx

from compile_fsdp.passes.analysis.collectives import WAIT, Packed, aten, insert, is_gather, numel, rearranged
from compile_fsdp.passes.analysis.costs import Costs, plan_gathers
from compile_fsdp.passes.analysis.effects import is_copy, parameter_of
from compile_fsdp.passes.analysis.layout import find_freed
from compile_fsdp.passes.post_grad.packing import Kind, MayJoin, Merge, Part, Writes, join, launch, pack_anew, split
from compile_fsdp.passes.report import PassCounts


def pack_gathers(graph: fx.Graph, *, merge: Merge = Merge.NONE, costs: Costs | None = None) -> PassCounts:
    """Pack the graph's all-gathers anew; for `merge`, see [Note: Who pays for a merged pack]."""
    return pack_anew(graph, _GATHERS, merge, _joining(graph, merge), costs)


def _joining(graph: fx.Graph, merge: Merge) -> MayJoin:
    freed = find_freed(graph)

    @cache
    def is_early(packed: Packed) -> bool:
        """Return whether the gather may be earlier than traced."""
        return (merge is Merge.SMALL or _stays_unsharded(packed, freed)) and _gathers_inputs(packed)

    def may_join(writes: Writes, earlier: Packed, later: Packed) -> bool:
        # The shards of the later gather must exist, unchanged, at the earlier gather.
        return is_early(earlier) and is_early(later) and writes[earlier.pack] == writes[later.pack]

    return may_join


def _gathers_inputs(packed: Packed) -> bool:
    """Return whether every shard is an input, or the cast of an input."""
    sources = [shard.all_input_nodes or [shard] for shard in packed.inputs]
    return all(node.op == "placeholder" for nodes in sources for node in nodes)


def _stays_unsharded(packed: Packed, freed: set[fx.Node | None]) -> bool:
    """Return whether all parameters of the pack are filled, and never freed."""
    values = rearranged(item for item in packed.outputs if item is not None)
    readers = {user for each in values for user in each.users} - values
    return all(is_copy(reader) and parameter_of(reader) not in freed for reader in readers)


def _place(run: Sequence[Packed]) -> Packed:
    """Return the first gather, with the casts of all shards moved before it."""
    for cast in (shard for packed in run[1:] for shard in packed.inputs if shard.op != "placeholder"):
        run[0].pack.prepend(cast)
    return run[0]


def _gather(place: Packed, pack: Sequence[Part]) -> dict[fx.Node, fx.Node]:
    graph, source = place.pack.graph, pack[0].source
    sent = join(pack, like=place.pack)
    launched = launch(sent, pack, like=source.collective)
    waited = insert(graph, WAIT, launched, like=source.after[0])
    rows = insert(graph, aten.reshape.default, waited, [source.ranks, numel(sent)], like=source.after[-1])
    return split(rows, pack, [numel(part.sent) for part in pack], 1)


_GATHERS = Kind(
    pack_gathers.__name__,
    ("gathers_packed_anew", "now", "gathered_alone", "bytes_not_copied"),
    is_gather,
    plan_gathers,
    copies=lambda ranks: 1 + ranks,
    place=_place,
    collect=_gather,
)
