"""Gather and reduce between two ranks on gloo by one message each way.

Precondition  tensors on the CPU, of sizes known beforehand; a process group of two ranks whose backend is gloo
Match         all-gathers; reduce-scatters that sum or average, and are waited for
Rewrite       each rank sends what the other one lacks, and nothing else; behind its wait, a reduction adds its own part
Report        collectives that became an exchange

    before                                    after
    %0 = all_gather_into_tensor(shard, 2)     %0 = exchange_shards(shard, 2)
    %1 = wait_tensor(%0)                      %1 = wait_tensor(%0)
    %2 = reduce_scatter_tensor(flat, 'avg')   %2 = exchange_parts(flat, 2)
    %3 = wait_tensor(%2)                      %3 = wait_tensor(%2)
                                              add_own_part_(%3, flat, 'avg')

What that saves, and why not between more ranks: [Note: What gloo does for two ranks]. The backend of a process group
is the same on all its ranks.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.compat import backend_name
from compile_fsdp.ops import add_own_part_, exchange_parts, exchange_shards
from compile_fsdp.passes.aliases import find_fake_tensor
from compile_fsdp.passes.collectives import GATHER, NAME, REDUCE, WAIT, numel, ranks_of
from compile_fsdp.passes.report import CountReport


def exchange_pairs(graph: fx.Graph) -> CountReport:
    """Turn the graph's collectives between two gloo ranks into exchanges.

    Args:
        graph: A post-grad graph. Collectives of a process group that this process does not have are left alone.
    """
    nodes_before = len(graph.nodes)
    gathers = [node for node in graph.find_nodes(op="call_function", target=GATHER) if _is_between_two(node)]
    reductions = [node for node in graph.find_nodes(op="call_function", target=REDUCE) if _can_add(node)]
    for gather in gathers:
        gather.target, gather.args = exchange_shards, (*gather.args, gather.meta.get(NAME, ""))
    for reduction in reductions:
        sent, reduce_op, ranks, group = reduction.args
        reduction.target = exchange_parts
        reduction.args = (sent, ranks, group, reduction.meta.get(NAME, ""))
        (wait,) = reduction.users
        with graph.inserting_after(wait):
            graph.call_function(add_own_part_, (wait, sent, reduce_op, group)).meta["val"] = None
    counts = (("gathers_by_exchange", len(gathers)), ("reductions_by_exchange", len(reductions)))
    return CountReport(exchange_pairs.__name__, nodes_before, len(graph.nodes), counts)


def _is_between_two(collective: fx.Node) -> bool:
    tensor = find_fake_tensor(collective)
    if tensor is None or tensor.device.type != "cpu" or ranks_of(collective) != 2 or numel(collective) < 1:
        return False
    return backend_name(str(collective.args[-1]), "cpu") == "gloo"


def _can_add(reduction: fx.Node) -> bool:
    if reduction.args[1] not in ("sum", "avg") or [user.target for user in reduction.users] != [WAIT]:
        return False
    return _is_between_two(reduction)
