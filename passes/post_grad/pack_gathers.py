"""Decide which parameters share an all-gather.

Precondition  packed all-gathers, see `collectives.py`
Match         shards whose copies into and out of the pack cost more than a separate collective; packs of more bytes
              than `Costs.pack_bytes`; with `merge`, packs whose parameters stay unsharded
Rewrite       such a shard gets its own all-gather, straight from the shard and into the parameter's own buffer;
              `plan_packs` packs the remaining shards
Report        gathers before and after; parameters that are gathered by themselves; bytes no longer copied

    before                                    after
    packed = cat([wide, narrow])              %0 = wait_tensor(all_gather_into_tensor(wide))
    %0 = wait_tensor(all_gather...(packed))   w = reshape(reshape(%0, [ranks, -1]), [8, 4])
    rows = reshape(%0, [ranks, -1])           %1 = wait_tensor(all_gather_into_tensor(narrow))
    parts = split_with_sizes(rows, ...)       n = reshape(reshape(%1, [ranks, -1]), [4])
    w = reshape(clone(parts[0]), [8, 4])
    n = reshape(clone(parts[1]), [4])

[Note: Who pays for a merged pack]
An early gather holds memory until its value is used. Parameters that stay unsharded to the end of the graph all exist
in the end, so gathering them together raises the peak by at most the pack. Packs of parameters that the graph frees are
never merged.

[Note: Kernels of a merged pack]
Packs of one group are alike in all blocks of a model, and Inductor compiles their copies once. In a pack of several
groups each parameter has a different place, so such packs are filled and read by ops that need no compiling
(`ops/packs.py`).
"""

from __future__ import annotations

import operator

from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes.analysis.collectives import (
    WAIT,
    Packed,
    Places,
    are_merged,
    aten,
    find_packed,
    insert,
    is_gather,
    is_rearrangement,
    joinable,
    launch,
    numel,
    positions,
)
from compile_fsdp.passes.analysis.costs import Costs, are_contiguous, device_costs, plan_gathers, size_bytes
from compile_fsdp.passes.analysis.effects import find_resizes, get_argument, is_copy
from compile_fsdp.passes.analysis.layout import get_size, is_zero
from compile_fsdp.passes.report import PassCounts


def pack_gathers(graph: fx.Graph, *, merge: bool = False, costs: Costs | None = None) -> PassCounts:
    """Pack the graph's all-gathers anew.

    Args:
        graph: A post-grad graph.
        merge: Whether packs may be joined. See [Note: Who pays for a merged pack].
        costs: Costs to decide by. None: the built-in costs of the graph's device.
    """
    nodes_before = len(graph.nodes)
    before = after = alone = copied = 0
    for run in joinable(find_packed(graph, is_gather), _Joining(graph) if merge else None):
        shards = [shard for packed in run for shard in packed.inputs]
        sizes = [size_bytes(shard) for shard in shards]
        own = costs or device_costs(run[0].collective)
        packs = _plan(shards, sizes, run[0].ranks, own, own.pack_bytes(run[0].ranks, is_spare=merge))
        if packs == positions(run):
            continue
        _pack(graph, run, packs)
        single = [pack[0] for pack in packs if len(pack) == 1]
        before += len(run)
        after += len(packs)
        alone += len(single)
        copied += sum((1 + run[0].ranks) * sizes[i] for i in single)
    counts = (("gathers_packed_anew", before), ("now", after), ("gathered_alone", alone), ("bytes_not_copied", copied))
    return PassCounts(pack_gathers.__name__, nodes_before, len(graph.nodes), counts)


def _plan(shards: list[fx.Node], sizes: list[int], ranks: int, costs: Costs, limit: int) -> list[list[int]]:
    if not are_contiguous(shards):
        return [list(range(len(sizes)))]
    return plan_gathers(sizes, ranks, limit, costs)


class _Joining:
    """Whether a packed gather may be issued with an earlier gather.

    See [Note: Who pays for a merged pack]. The shards of the later gather must exist, unchanged, at the earlier gather.
    """

    def __init__(self, graph: fx.Graph) -> None:
        frees = (node for node in find_resizes(graph) if is_zero(get_size(get_argument(node, 1, "new_size"))))
        self._freed = {get_argument(node, 0, "variable") for node in frees}
        self._places = Places(graph)
        self._stays: dict[fx.Node, bool] = {}

    def __call__(self, earlier: Packed, later: Packed) -> bool:
        if not (self._stays_unsharded(earlier) and self._stays_unsharded(later)):
            return False
        return not self._places.is_written_between(earlier.pack, later.pack)

    def _stays_unsharded(self, packed: Packed) -> bool:
        if packed.pack not in self._stays:
            self._stays[packed.pack] = _stays_unsharded(packed, self._freed)
        return self._stays[packed.pack]


def _stays_unsharded(packed: Packed, freed: set[object]) -> bool:
    """Return whether the pack fills only parameters that are never freed.

    False as well if it gathers anything but inputs of the graph.
    """
    # The shard is an input, or the cast of an input.
    sources = [shard.all_input_nodes or [shard] for shard in packed.inputs]
    if any(node.op != "placeholder" for nodes in sources for node in nodes):
        return False
    stack = [item for item in packed.outputs if item is not None]
    while stack:
        for user in stack.pop().users:
            if is_rearrangement(user):
                stack.append(user)
            elif not is_copy(user) or get_argument(user, 0, "tensor") in freed:
                return False
    return True


def _pack(graph: fx.Graph, run: list[Packed], packs: list[list[int]]) -> None:
    first = run[0]
    shards = [shard for packed in run for shard in packed.inputs]
    outputs = [output for packed in run for output in packed.outputs]
    owners = [packed for packed in run for _ in packed.inputs]
    for cast in (shard for packed in run[1:] for shard in packed.inputs if shard.op != "placeholder"):
        first.pack.prepend(cast)
    with graph.inserting_before(first.pack):
        for pack in packs:
            sent = [shards[i] for i in pack]
            sources = [owners[i] for i in pack]
            if len(pack) == 1:
                _replace(outputs[pack[0]], _gather(graph, sources, sent[0]), is_own=True)
                continue
            is_merged = are_merged(sources)
            join = ops.cat if is_merged else aten.cat.default
            part = ops.split_with_sizes_copy if is_merged else aten.split_with_sizes.default
            rows = _gather(graph, sources, insert(graph, join, sent, like=first.pack))
            split = insert(graph, part, rows, [numel(each) for each in sent], 1, like=rows)
            for position, i in enumerate(pack):
                _replace(outputs[i], insert(graph, operator.getitem, split, position, like=rows), is_own=is_merged)
    for packed in run:
        packed.erase()


def _gather(graph: fx.Graph, sources: list[Packed], sent: fx.Node) -> fx.Node:
    """Gather `sent` from all ranks, as [ranks, numel].

    `sources`: the collectives that were to send the parts of `sent`.
    """
    packed = sources[0]
    launched = launch(graph, sent, sources, like=packed.collective)
    waited = insert(graph, WAIT, launched, like=packed.after[0])
    return insert(graph, aten.reshape.default, waited, [packed.ranks, numel(sent)], like=packed.after[-1])


def _replace(item: fx.Node | None, rows: fx.Node, *, is_own: bool) -> None:
    """Replace the item of an old pack by the parameter's gathered rows.

    `is_own`: whether the rows are a contiguous tensor, and no part of a pack.
    """
    if item is None:
        return
    users = list(item.users)
    item.replace_all_uses_with(rows)
    if is_own and len(users) == 1 and users[0].target is aten.clone.default:
        # The clone joined rows that lay apart in the pack. The new rows are contiguous, and nothing else reads them.
        users[0].replace_all_uses_with(rows)
        rows.graph.erase_node(users[0])
