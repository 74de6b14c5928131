"""Call equal blocks of a forward as one function.

Precondition  a forward graph, as Dynamo has traced it, after all passes that match its ops
Match         blocks with equals; see [Note: What makes blocks equal]
Rewrite       each block becomes a call, and its ops leave the graph
Report        nothing, because a call computes what its block computed

    before                                    after
    h = linear(x, weight_0)                   call = run_block("5d41...", 0, x, weight_0)
    y = relu(h)                               y = call[0]
    resize_storage_bytes_(weight_0, 0)        resize_storage_bytes_(weight_0, 0)

A block is traced and compiled once, so a further equal block costs a graph two calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence

from torch import fx

from compile_fsdp.ops import run_block
from compile_fsdp.ops.call_block import find_block
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.equal_blocks import BlockCall, find_equal_blocks

# Compiles the ops of a block, which has so many equals, and returns its name; None if it cannot be called.
CompileBlock = Callable[[BlockCall, int], str | None]


def outline_blocks(graph: fx.Graph, compile_block: CompileBlock) -> None:
    """Replace equal blocks by calls."""
    every = [(equals, compile_block(equals[0], len(equals))) for equals in find_equal_blocks(graph)]
    replaced: dict[fx.Node, fx.Node] = {}
    calls: set[Hashable] = set()
    for call, name in ((call, name) for equals, name in every if name is not None for call in equals):
        inputs = tuple(replaced.get(node, node) for node in (*call.sizes, *call.tensors))
        # AOTAutograd joins calls with equal inputs, although each of them may draw random numbers. Computed inputs may
        # turn out to be equal there.
        block = find_block(name)
        is_random = block is not None and block.forward.is_random
        key = name, tuple(node for node in inputs if node.op == "placeholder" or not is_random)
        if key not in calls:
            calls.add(key)
            _outline(call, name, inputs, replaced)


def _outline(block: BlockCall, name: str, inputs: Sequence[fx.Node], replaced: dict[fx.Node, fx.Node]) -> None:
    """Replace one block. `replaced`: outputs of earlier blocks, which may be inputs of a later one."""
    graph, ops = block.ops[0].graph, set(block.ops)
    with graph.inserting_after(block.ops[-1]):
        call = graph.call_function(run_block, (name, len(block.sizes), *inputs))
    call.meta = {**block.outputs[0].meta, "example_value": tuple(map(fake_value, block.outputs))}
    last = call
    for i, output in enumerate(block.outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, i))
        last.meta, replaced[output] = output.meta, last
        output.replace_all_uses_with(last, delete_user_cb=lambda user: user not in ops)
    for node in reversed(block.ops):
        graph.erase_node(node)
