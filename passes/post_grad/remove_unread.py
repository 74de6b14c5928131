"""Gather nothing that is not read, and nothing twice at a time.

Precondition  a post-grad graph
Match         all-gathers of the graph's inputs, and what is made of them, that no node reads: of a frozen input's or an
              unused parameter, of a first layer whose input needs no gradient; the same shards gathered again while
              their gathered value is still to be read; empty buffers of gradients that were never copied
Rewrite       what is unread goes; readers of the second gather take the first one's value
Report        gathers that nobody read, gathers that were repeated, and other nodes without a reader

    before                                    after
    a = wait_tensor(all_gather(shard))        a = wait_tensor(all_gather(shard))
    x = mm(x, a)                              x = mm(x, a)
    b = wait_tensor(all_gather(shard))        x = mm(x, a)
    x = mm(x, b)                              x = mm(x, a)
    x = mm(x, a)
    c = wait_tensor(all_gather(other))

A gather is a collective: all ranks leave it out, or none. What is read is the same in all their graphs.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.collectives import aten, group_of, is_gather, is_rearrangement, is_wait, ranks_of
from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.passes.report import PassCounts

_EMPTY = (aten.new_empty_strided.default, aten.empty_strided.default, aten.new_empty.default, aten.empty.memory_format)


def remove_unread(graph: fx.Graph) -> PassCounts:
    """Remove gathers that are not read, or are there already."""
    nodes_before = len(graph.nodes)
    repeated = _join_repeated(graph)
    unread = others = 0
    for node in reversed(list(graph.nodes)):
        if node.users or not _has_no_effect(node):
            continue
        unread += is_gather(node)
        others += not is_gather(node)
        graph.erase_node(node)
    counts = (("gathers_unread", unread - repeated), ("gathers_repeated", repeated), ("other_nodes", others))
    return PassCounts(remove_unread.__name__, nodes_before, len(graph.nodes), counts)


def _has_no_effect(node: fx.Node) -> bool:
    if is_wait(node):
        collective = node.args[0]
        return isinstance(collective, fx.Node) and is_gather(collective) and len(collective.users) == 1
    return node.target in _EMPTY or is_gather(node) or is_rearrangement(node)


def _join_repeated(graph: fx.Graph) -> int:
    order = {node: i for i, node in enumerate(graph.nodes)}
    effects = Effects(graph.owning_module)
    aliases = Aliases(graph, effects)
    written = {key for node in effects.find_written(graph) for key in aliases.classes(node)}
    first: dict[object, fx.Node] = {}
    joined = 0
    for node in filter(is_gather, graph.nodes):
        if (key := _sent(node)) is None or [is_wait(user) for user in node.users] != [True]:
            continue
        waited = next(iter(node.users))
        if any(each in written for source in (*key[0], waited) for each in aliases.classes(source)):
            continue  # The two need not gather the same, or the first value may no longer be what it was.
        earlier = first.get(key)
        if earlier is not None and _last_read(earlier, order) > order[waited]:
            waited.replace_all_uses_with(earlier)
            joined += 1
        else:
            first[key] = waited
    return joined


def _sent(gather: fx.Node) -> tuple[tuple[fx.Node, ...], int, str] | None:
    """What tells apart what two gathers send: inputs of the graph, and how; None where it is something else."""
    source = gather.args[0]
    assert isinstance(source, fx.Node)
    shards = tuple(source.args[0]) if source.target is aten.cat.default else (source,)  # type: ignore[arg-type]
    if any(not isinstance(each, fx.Node) or each.op != "placeholder" for each in shards):
        return None
    return shards, ranks_of(gather), group_of(gather)


def _last_read(waited: fx.Node, order: dict[fx.Node, int]) -> int:
    """Where the last node stands that reads the value or a view or copy of it."""
    found, last = {waited}, order[waited]
    stack = [waited]
    while stack:
        for user in stack.pop().users:
            last = max(last, order[user])
            if user not in found and is_rearrangement(user):
                found.add(user)
                stack.append(user)
    return last
