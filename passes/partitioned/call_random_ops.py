"""Call random ops that a checkpoint runs again as graphs of their own.

Precondition  the forward of a block, from AOTAutograd's partitioner
Match         random ops, wrapped to save the state of the random numbers
Rewrite       each becomes a call of a graph that has this op alone
Report        the graphs, by name

    before                                                    after
    both = run_and_save_rng_state(bernoulli, x, 0.5)          both = call_random_block([x], [], "5d41... draw 0")
    state = getitem(both, 0)                                  state = getitem(both, 0)
    mask = getitem(both, 1)                                   mask = getitem(both, 1)

A block is traced once more to compile it, but AOTAutograd has no rule for `run_and_save_rng_state`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from compile_fsdp.ops.call_block import call_random_block
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.subgraphs import copy_ops
from compile_fsdp.passes.partitioned.drop_random_states import saves_random_state


def call_random_ops(graph: fx.Graph, block: str) -> dict[str, fx.Graph]:
    """Return the graph of each op by the name of its call, which begins with the name of the block."""
    made: dict[str, fx.Graph] = {}
    for node in filter(saves_random_state, list(graph.nodes)):
        items = list(_items(node))
        results = [item for item in items if isinstance(fake_value(item), torch.Tensor)]
        sizes = [each for each in node.all_input_nodes if not isinstance(fake_value(each), torch.Tensor)]
        tensors = [each for each in node.all_input_nodes if each not in sizes]
        name = f"{block} draw {len(made)}"
        made[name] = copy_ops([*sizes, *tensors], [node, *items], results)
        with graph.inserting_before(node):
            call = graph.call_function(call_random_block, (tensors, sizes, name))
            call.meta["val"] = list(map(fake_value, results))
            for i, result in enumerate(results):
                item = graph.call_function(operator.getitem, (call, i))
                item.meta = dict(result.meta)
                result.replace_all_uses_with(item)
        for each in reversed([node, *items]):
            graph.erase_node(each)
    return made


def _items(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that take items out of a node's nested result."""
    for user in list(node.users):
        assert user.target is operator.getitem
        yield user
        if not isinstance(fake_value(user), torch.Tensor):
            yield from _items(user)
