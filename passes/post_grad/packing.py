"""Pack collectives of one kind anew: all-gathers, or reduce-scatters.

[Note: Kernels of packs]
Packs are joined and split by ops that need no compiling (`ops/packs.py`), as in eager FSDP2. Inductor would fuse these
copies with the compute around them, and so compile a kernel twice where one pack is beside it and another is not. With
mixed precision a tensor is cast on its way into the pack, because a separate cast is a kernel for each tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from torch import fx

from compile_fsdp.ops import all_gather_into_tensor, cat, reduce_scatter_tensor, split_with_sizes_copy
from compile_fsdp.passes.analysis.aliases import get_fake_tensor
from compile_fsdp.passes.analysis.collectives import (
    CAST,
    RESHAPES,
    Packed,
    aten,
    find_packed,
    insert,
    name_of,
    settings_of,
)
from compile_fsdp.passes.analysis.costs import Costs, communication, device_costs, size_bytes
from compile_fsdp.passes.analysis.effects import Effects, is_barrier
from compile_fsdp.passes.report import PassCounts


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor in a pack."""

    sent: fx.Node  # a shard, or the rows of a gradient
    uncast: fx.Node  # becomes `sent` by a cast, and perhaps a reshape; `sent` itself if nothing is cast
    result: fx.Node | None  # item of the old pack; None if nothing reads it
    source: Packed  # collective that was to send it


Writes = Mapping[fx.Node, int]
"""By node, number of nodes up to it that may write, apart from windows: equal if nothing writes between two nodes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """All-gathers, or reduce-scatters."""

    name: str  # of the pass
    # Labels of its report: old collectives, new collectives, separate tensors, and bytes no longer copied.
    counts: tuple[str, str, str, str]
    matches: Callable[[fx.Node], bool]  # whether a node launches such a collective
    plan: Callable[..., list[list[int]]]  # `plan_gathers` or `plan_reductions`
    copies: Callable[[int], int]  # bytes copied into and out of a pack, per byte of a tensor, over so many ranks
    place: Callable[[Sequence[Packed]], Packed]  # the collective of a run at which new collectives are issued
    # Adds a collective for a pack at that place, and returns a replacement for each old result.
    collect: Callable[[Packed, Sequence[Part]], dict[fx.Node, fx.Node]]


# Whether a collective, and a later collective with equal settings, may be issued at one place of the graph.
MayJoin = Callable[[Writes, Packed, Packed], bool]


class Merge(Enum):
    """Which collectives share packs with others of their kind."""

    NONE = "none"
    SMALL = "small"  # those that have at most `Costs.small_bytes` together
    ALL = "all"  # all, in packs for memory to spare


def pack_anew(graph: fx.Graph, kind: Kind, merge: Merge, may_join: MayJoin, costs: Costs | None) -> PassCounts:
    """Replace packed collectives by collectives with planned packs.

    `costs`: None for the built-in costs of the graph's device.
    """
    nodes_before = len(graph.nodes)
    before = after = alone = copied = 0
    effects = Effects(graph.owning_module)
    writes = dict(zip(graph.nodes, accumulate(is_barrier(node, effects) for node in graph.nodes), strict=True))
    replaced: dict[fx.Node, fx.Node] = {}
    obsolete: list[Packed] = []
    sent: list[fx.Node] = []
    traced = [each for each in find_packed(graph, kind.matches) if each.pack.target is not cat]  # not packed anew yet

    def may_merge(run: Sequence[Packed], later: Packed) -> bool:
        if merge is Merge.NONE or not all(may_join(writes, earlier, later) for earlier in run):
            return False
        own = costs or device_costs(later.collective)
        unsharded = sum(communication(each.collective, own)[0] for each in (*run, later))
        return merge is Merge.ALL or unsharded <= own.small_bytes(later.ranks) * later.ranks

    for run in _runs(traced, may_merge):
        parts = [
            Part(sent, _uncast(sent, packed, writes), result, packed)
            for packed in run
            for sent, result in zip(packed.inputs, packed.outputs, strict=True)
        ]
        sent += [part.sent for part in parts]
        sizes, ranks = [size_bytes(part.sent) for part in parts], run[0].ranks
        packs = [list(range(len(parts)))]
        if all(get_fake_tensor(part.sent).is_contiguous() for part in parts):
            own = costs or device_costs(run[0].collective)
            packs = kind.plan(sizes, ranks, own, is_spare=merge is Merge.ALL)
        place = kind.place(run)
        with graph.inserting_before(place.pack):
            for pack in packs:
                replaced |= kind.collect(place, [parts[i] for i in pack])
        obsolete += run
        single = [sizes[pack[0]] for pack in packs if len(pack) == 1]
        before += len(run)
        after += len(packs)
        alone += len(single)
        copied += kind.copies(ranks) * sum(single)
    # All at once, because replacing nodes one by one rewrites the graph's output for each of them.
    for user in dict.fromkeys(user for node in replaced for user in node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda node: replaced.get(node, node))
    for node in reversed(replaced):
        graph.erase_node(node)
    for packed in obsolete:
        packed.erase()
    # Casts that happen in the copy into a pack have no user left.
    for node in dict.fromkeys([*sent, *(source for each in sent for source in each.all_input_nodes)]):
        if not node.users:
            graph.erase_node(node)
    counts = zip(kind.counts, (before, after, alone, copied), strict=True)
    return PassCounts(kind.name, nodes_before, len(graph.nodes), tuple(counts))


def _runs(packed: Sequence[Packed], may_merge: Callable[[Sequence[Packed], Packed], bool]) -> list[list[Packed]]:
    """Group the collectives into runs of one kind that share packs."""
    runs: list[list[Packed]] = []
    latest: dict[object, list[Packed]] = {}
    for each in packed:
        kind = each.kind
        run = latest.get(kind, [])
        if not run or not may_merge(run, each):
            run = latest[kind] = []
            runs.append(run)
        run.append(each)
    return runs


def join(pack: Sequence[Part], dim: int = 0, *, like: fx.Node) -> fx.Node:
    """Concatenate the tensors of a pack, and cast them. See [Note: Kernels of packs]."""
    if len(pack) == 1:
        return pack[0].sent
    tensors = [_reshape_uncast(part, like.graph) for part in pack]
    if all(part.uncast is part.sent for part in pack):
        return insert(like.graph, cat, tensors, dim, like=like)
    return insert(like.graph, cat, tensors, dim, get_fake_tensor(pack[0].sent).dtype, like=like)


def _uncast(sent: fx.Node, packed: Packed, writes: Writes) -> fx.Node:
    cast = sent.all_input_nodes[0] if sent.target in RESHAPES else sent
    if cast.target is not CAST or writes[cast] != writes[packed.pack]:
        return sent
    return cast.all_input_nodes[0]


def _reshape_uncast(part: Part, graph: fx.Graph) -> fx.Node:
    if part.uncast is part.sent or part.sent.target not in RESHAPES:
        return part.uncast
    return insert(graph, aten.reshape.default, part.uncast, *part.sent.args[1:], like=part.sent)


def launch(sent: fx.Node, pack: Sequence[Part], like: fx.Node) -> fx.Node:
    """Add a collective with the settings of `like`, and the names of the pack's old collectives."""
    name: tuple[str, ...] = ()
    if like.target in (all_gather_into_tensor, reduce_scatter_tensor):
        names = dict.fromkeys(name_of(part.source.collective) for part in pack)
        name = (", ".join(filter(None, names)),)
    assert callable(like.target)
    return insert(like.graph, like.target, sent, *settings_of(like), *name, like=like)


def split(result: fx.Node, pack: Sequence[Part], numels: Sequence[int], dim: int) -> dict[fx.Node, fx.Node]:
    """Split a collective's result into copies of these sizes; return what replaces each old result that is read."""
    items = insert(result.graph, split_with_sizes_copy, result, list(numels), dim, like=result) if pack[1:] else None
    replaced: dict[fx.Node, fx.Node] = {}
    for i, part in enumerate(pack):
        if part.result is not None:
            item = result if items is None else insert(result.graph, operator.getitem, items, i, like=result)
            replaced[part.result] = item
    return replaced
