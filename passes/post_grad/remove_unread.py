"""Remove all-gathers that nothing reads, and repeated all-gathers.

Precondition  a post-grad graph
Match         unread all-gathers and unread values made of them, for example of an unused parameter, or of a first layer
              whose input needs no gradient; all-gathers of shards whose earlier gathered value is still to be read;
              empty buffers of gradients that were never copied
Rewrite       unread nodes are erased; readers of a repeated gather take the value of the first gather
Report        gathers that nothing read, repeated gathers, and remaining nodes without a reader

    before                                    after
    a = wait_tensor(all_gather(shard))        a = wait_tensor(all_gather(shard))
    x = mm(x, a)                              x = mm(x, a)
    b = wait_tensor(all_gather(shard))        x = mm(x, a)
    x = mm(x, b)                              x = mm(x, a)
    x = mm(x, a)
    c = wait_tensor(all_gather(other))

A gather is a collective, so all ranks remove it, or none. The graphs of all ranks read equal parameters.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.collectives import (
    aten,
    is_gather,
    is_rearrangement,
    is_wait,
    rearranged,
    settings_of,
)
from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.passes.report import PassCounts

_EMPTY = (aten.new_empty_strided.default, aten.empty_strided.default, aten.new_empty.default, aten.empty.memory_format)


def remove_unread(graph: fx.Graph) -> PassCounts:
    """Remove gathers whose value is not read, or exists already."""
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
    effects = Effects(graph.owning_module)
    aliases = Aliases(graph, effects)
    written = set(aliases.classes_of(effects.find_written(graph)))
    first: dict[object, fx.Node] = {}
    joined = 0
    for node in filter(is_gather, graph.nodes):
        if (key := _sent(node)) is None or [is_wait(user) for user in node.users] != [True]:
            continue
        waited = next(iter(node.users))
        if not written.isdisjoint(aliases.classes_of((*key[0], waited))):
            continue  # The two may gather different values, or the first value may have changed.
        earlier = first.get(key)
        if earlier is not None and _is_read_behind(earlier, waited):
            waited.replace_all_uses_with(earlier)
            joined += 1
        else:
            first[key] = waited
    return joined


def _sent(gather: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[Any, ...]] | None:
    """Return the inputs and settings of a gather, or None if it sends anything but inputs of the graph."""
    source = gather.args[0]
    assert isinstance(source, fx.Node)
    is_joined = source.target is aten.cat.default
    shards = tuple(source.args[0]) if is_joined else (source,)  # type: ignore[arg-type]
    dim = (*source.args[1:], *source.kwargs.items()) if is_joined else ()
    if any(not isinstance(each, fx.Node) or each.op != "placeholder" for each in shards):
        return None
    return shards, (*dim, *settings_of(gather))


def _is_read_behind(value: fx.Node, place: fx.Node) -> bool:
    """Return whether a node behind `place` reads the value, its views or its copies."""
    return any(user > place for each in rearranged([value]) for user in each.users)
