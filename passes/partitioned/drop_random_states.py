"""Run attention again without the state of the random numbers, if it has no dropout.

Precondition  a forward or a backward from AOTAutograd's partitioner
Match         calls of attention without dropout, wrapped to save or to restore a state
Rewrite       attention is called directly; states that nothing reads leave the inputs and results; the sizes of the
              other states become constants
Report        nothing, because a state that stays only costs memory

    before                                                    after
    both = run_and_save_rng_state(attention, q, k, v)         y = attention(q, k, v)
    state = getitem(both, 0)
    y = getitem(both, 1)
    return y, state                                           return y

Before torch 2.15, the partitioner wraps all attention that a checkpoint runs again, because torch marks it as random
for its argument for dropout.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import get_fake_tensor
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.torch_compat.dispatch import (
    HigherOrderOperator,
    OpOverload,
    attention_gradients,
    attention_ops,
    op_name,
    read_argument,
)


def drop_random_states(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if (saves := saves_random_state(node)) or reads_random_state(node):
            _call_directly(node, saves_state=saves)


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers from the present state."""
    if saves_random_state(node):
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target in attention_ops:
        return bool(read_argument(node, "dropout_p") != 0.0)
    return node.target not in attention_gradients


def saves_random_state(node: fx.Node) -> bool:
    """Return whether a node runs an op, and returns the state of the random numbers before it and the op's result."""
    return isinstance(node.target, HigherOrderOperator) and op_name(node.target) == "run_and_save_rng_state"


def reads_random_state(node: fx.Node) -> bool:
    """Return whether a node runs an op with a given state of the random numbers, its first argument."""
    return isinstance(node.target, HigherOrderOperator) and op_name(node.target) == "run_with_rng_state"


def _call_directly(node: fx.Node, *, saves_state: bool) -> None:
    """Replace a wrapped op, unless it is random."""
    graph, (state, *call) = node.graph, (None, *node.args) if saves_state else node.args
    with graph.inserting_before(node):
        plain = graph.call_function(call[0], tuple(call[1:]), node.kwargs)  # type: ignore[arg-type]
    if is_random(plain):
        graph.erase_node(plain)
        states = filter(is_state, node.users) if saves_state else node.all_input_nodes[:1]
        for each in states:  # which have a symbolic size from the partitioner
            value = get_fake_tensor(each)
            each.meta["val"] = value.new_empty([size_hint(size) for size in value.shape])
        return
    plain.meta = dict(node.meta)
    if saves_state:
        for item in list(node.users):
            assert item.target is operator.getitem
            if is_state(item):
                _stop_returning(item)
            else:
                plain.meta = dict(item.meta)
                item.replace_all_uses_with(plain)
            graph.erase_node(item)
    node.replace_all_uses_with(plain)
    graph.erase_node(node)
    if isinstance(state, fx.Node):
        graph.erase_node(state)


def is_state(node: fx.Node) -> bool:
    """Return whether a node is the state that another one saves."""
    if node.target is not operator.getitem:
        return False
    source, item = node.args
    assert isinstance(source, fx.Node)
    return saves_random_state(source) and bool(item == 0)


def _stop_returning(node: fx.Node) -> None:
    output = node.graph.output_node()
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    output.args = (tuple(each for each in results if each is not node),)
