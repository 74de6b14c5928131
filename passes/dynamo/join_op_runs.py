"""Join runs of plain ops into calls that Dynamo does not trace.

Precondition  a graph as compiled autograd has captured it, without symbolic sizes
Match         neighbouring aten ops that write nothing and draw no random numbers, and whose result sizes do not
              depend on data
Rewrite       each run of such ops becomes a call of a function that calls them
Report        the functions, for `expand_group_calls`

    mm = aten.mm(tangent, saved)
    permute = aten.permute(mm, [1, 0])            run = run_of_ops(tangent, saved)
    hooked = call_hook(hooks[0], permute)         hooked = call_hook(hooks[0], run)

See [Note: One call for a whole group]. Most nodes that Dynamo would interpret in a backward are ops that AOTAutograd
has traced already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.effects import DEPENDS_ON_DATA, Effects
from compile_fsdp.torch_compat.dispatch import OpOverload

_FEWEST = 3  # fewest ops that are worth a call

# Tags of ops that stay in the graph. Random ops would else change their order, because those without inputs stay.
_APART = {*DEPENDS_ON_DATA, torch.Tag.nondeterministic_seeded}


def join_op_runs(graph: fx.Graph) -> set[Callable[..., Any]]:
    """Join neighbouring ops, and return the functions that the graph calls now."""
    functions: set[Callable[..., Any]] = set()
    _, *others = graph.find_nodes(op="placeholder")
    if any(node.users for node in others if node.target in ("sizes", "scalars")):
        return functions
    effects = Effects(graph.owning_module)
    run: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        if node.target is operator.getitem or _is_plain(node, effects):
            # Items of the graph's inputs, and ops without inputs, stay where they are, before the call.
            if node.all_input_nodes and (node.target is not operator.getitem or node.args[0] in run):
                run[node] = None
            continue
        if len(run) >= _FEWEST and (function := _join(run, node)) is not None:
            functions.add(function)
        run = {}
    return functions


def _is_plain(node: fx.Node, effects: Effects) -> bool:
    if not effects.only_computes(node):
        return False
    assert isinstance(node.target, OpOverload)
    return _APART.isdisjoint(node.target.tags)


def _join(run: Collection[fx.Node], before: fx.Node) -> Callable[..., Any] | None:
    outputs = [node for node in run if any(user not in run for user in node.users)]
    inputs = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in run))
    if any(user.target is operator.getitem for node in outputs for user in node.users):
        return None  # a tuple result, whose items are outside the run
    function = _function(run, inputs, outputs)
    graph = before.graph
    with graph.inserting_before(before):
        call = graph.call_function(function, tuple(inputs))
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(outputs))]
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in run)
    for node in reversed(list(run)):
        graph.erase_node(node)
    return function


def _function(run: Collection[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Callable[..., Any]:
    # Copies to a new graph, because the nodes would keep the captured graph, and so the model, alive.
    ops = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    starts = [copies.setdefault(node, ops.placeholder(f"input_{i}")) for i, node in enumerate(inputs)]
    steps = [copies.setdefault(node, ops.node_copy(node, copies.__getitem__)) for node in run]
    results = [copies[node] for node in outputs]

    def run_of_ops(*values: Any) -> tuple[Any, ...]:
        found = dict(zip(starts, values, strict=True))
        for node in steps:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple([found[node] for node in results])

    marked: Callable[..., Any] = torch.compiler.allow_in_graph(run_of_ops)
    return marked
