"""Drop computations of a captured backward that only undefined gradients need.

Precondition  a graph as compiled autograd has captured it, before its runs of ops are joined
Match         zeros in the place of an undefined gradient, and values computed from such zeros alone
Rewrite       those computations are removed, with their hooks and the gradients that they accumulate; other ops read
              zeros in place of such a value, and a sum of it and a defined value becomes the defined value
Report        positions, among the inputs, of the leaves that get no gradient

    zeros = aten.zeros([3, 2])
    prologue = call_aot_bwd_prologue(..., (grad, zeros))        prologue = call_aot_bwd_prologue(..., (grad, zeros))
    mm = aten.mm(prologue[1], weight_b)
    mm_1 = aten.mm(prologue[0], weight_a)                       mm_1 = aten.mm(prologue[0], weight_a)
    add = aten.add(mm, mm_1)
    call_accumulate_grad(bias_b, aten.sum(prologue[1]))
    call_accumulate_grad(bias, aten.sum(add))                   call_accumulate_grad(bias, aten.sum(mm_1))

[Note: Undefined gradients]
AOTAutograd derives one backward for all outputs of a forward, and computes it with zeros for outputs that the loss does
not use. Autograd does not run the nodes behind such outputs: gradients stay None, hooks are not called, and an
optimizer leaves the parameters alone. The derivatives of ops are linear in the incoming gradients, so a value that
depends on zeros alone is zero. An autograd function of the user may compute anything, such as whether a gradient is
finite. So a value that may not be zero stays, if others read it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import is_declared_view
from compile_fsdp.passes.analysis.effects import DEPENDS_ON_DATA, Effects, nodes_in
from compile_fsdp.torch_compat.autograd import (
    AotGradients,
    autograd_function,
    find_aot_gradients,
    is_gradient_hook,
    leaf_of_accumulation,
    leaf_of_hook,
)
from compile_fsdp.torch_compat.dispatch import FakeTensorMode, OpOverload

_aten = torch.ops.aten

# Ops that are zero if their first argument is, if any is, and if all are.
_LINEAR = {
    *(_aten.neg.default, _aten.clone.default, _aten._to_copy.default, _aten.div.Tensor, _aten.div.Scalar),
    *(
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
    ),
}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.mm.default, _aten.bmm.default}
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor, _aten.cat.default}


def drop_undefined_gradients(graph: fx.Graph, has_gradient: Sequence[bool], inputs: Sequence[Any]) -> list[int]:
    """Remove the computations that an ordinary backward would not run.

    Args:
        graph: A backward as compiled autograd has captured it.
        has_gradient: By result of the forward graph, whether it has a gradient at all.
        inputs: Inputs of the graph in the backward that runs; its first placeholder is the list of them.
    Returns:
        Positions, in the list of inputs, of the leaves that get no gradient.
    """
    found = find_aot_gradients(graph)
    if found is None or not any(map(_is_zeros, found.given)):
        return []
    values = _find_values(graph, inputs)
    if not (undefined := _find_undefined(found, has_gradient, values)):
        return []
    behind = _only_behind(graph, [node for node in found.read if node not in undefined], undefined)
    kept = _find_kept(graph, behind, undefined)
    dropped = dict.fromkeys(node for node in behind if node not in kept)
    for node in list(graph.nodes):
        if node not in dropped and any(each in dropped for each in node.all_input_nodes):
            _do_without(node, dropped, values)
    leaves = {leaf for node in dropped if (leaf := leaf_of_accumulation(node)) is not None}
    hooks = {node for node in graph.nodes if leaf_of_hook(node) in leaves}
    effects = Effects(graph.owning_module)
    for node in reversed(list(graph.nodes)):
        # Also erases the inputs computed for a dropped node, for example a parameter's view, whose read needs a gather.
        is_item = node.target is operator.getitem
        if node in hooks or (not node.users and (node in dropped or is_item or effects.only_computes(node))):
            graph.erase_node(node)
    return sorted(_position(leaf) for leaf in leaves)


def _is_zeros(gradient: object) -> bool:
    return isinstance(gradient, fx.Node) and gradient.target is _aten.zeros.default


def _find_undefined(found: AotGradients, has_gradient: Sequence[bool], values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the gradients that AOTAutograd's ops read, and that are zeros in the place of an undefined one."""
    if len(found.given) == len(has_gradient):
        given = [each for each, has in zip(found.given, has_gradient, strict=True) if has]
        if len(given) == len(found.read):
            return [read for read, each in zip(found.read, given, strict=True) if _is_zeros(each)]
    # A forward that returns views of one result, or changes an input, has further gradients, and of the views none is
    # read. Then the results of the prologue tell which gradients are read, unless it copies them or sizes are symbolic.
    zeros = [values[each] for each in found.given if isinstance(each, fx.Node) and _is_zeros(each) and each in values]
    return [read for read in found.read if any(values.get(read) is each for each in zeros)]


def _only_behind(graph: fx.Graph, defined: Collection[fx.Node], undefined: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that depend on undefined but no defined gradients."""
    behind_defined, only = set(defined), dict.fromkeys(undefined)
    for node in graph.nodes:
        if node in only or any(each in behind_defined for each in (node, *node.all_input_nodes)):
            behind_defined.update({node} - only.keys())
        elif any(each in only for each in node.all_input_nodes):
            only[node] = None
    return only


def _find_kept(graph: fx.Graph, behind: Collection[fx.Node], undefined: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes behind undefined gradients alone that may not be zero, and that others read."""
    zeros = set(undefined)
    for node in behind:
        if _keeps_zero(node, zeros):
            zeros.add(node)
    kept: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in behind or node in kept:
            kept.update(each for each in node.all_input_nodes if each in behind and each not in zeros)
    return kept


def _keeps_zero(node: fx.Node, zeros: Collection[fx.Node]) -> bool:
    """Return whether a node behind `zeros` is surely zero, or no op of ATen."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return node.target is not operator.getitem or node.args[0] in zeros
    if is_declared_view(node) or node.target in _LINEAR or "backward" in node.target.name():
        return node.args[0] in zeros
    if node.target in _PRODUCTS:
        return any(each in zeros for each in node.all_input_nodes)
    return node.target in _SUMS and all(each in zeros for each in nodes_in(node.args[:2]))


def _do_without(node: fx.Node, dropped: Collection[fx.Node], values: Mapping[fx.Node, Any]) -> None:
    """Read new zeros for dropped inputs of known shape; a sum becomes its other input if shape and dtype are equal."""
    for each in node.all_input_nodes:
        if each not in dropped or not isinstance(zero := values.get(each), torch.Tensor):
            continue
        others = [other for other in node.all_input_nodes if other is not each]
        if node.target is _aten.add.Tensor and not node.kwargs and others and _is_alike(values.get(others[0]), zero):
            node.replace_all_uses_with(others[0])
            node.graph.erase_node(node)
            return
        with node.graph.inserting_before(node):
            settings: dict[str, Any] = {"dtype": zero.dtype, "device": zero.device}
            node.replace_input_with(each, node.graph.call_function(_aten.zeros.default, (list(zero.shape),), settings))


def _is_alike(value: object, other: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (other.shape, other.dtype)


def _position(leaf: fx.Node) -> int:
    assert leaf.target is operator.getitem and isinstance(leaf.args[1], int)
    return leaf.args[1]


def _find_values(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Return fake results by node where they are known. Results of tensor subclasses, for example, are missing."""
    first, *_ = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode() as mode:
        for node in graph.find_nodes(op="call_function", target=operator.getitem):
            if node.args[0] is first and type(tensor := inputs[node.args[1]]) in (torch.Tensor, torch.nn.Parameter):
                values[node] = mode.from_tensor(tensor)
        for node in graph.nodes:
            if is_gradient_hook(node) and node.args[-1] in values:
                values[node] = values[node.args[-1]]
            elif node not in values and _is_known(node) and all(each in values for each in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _is_known(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return DEPENDS_ON_DATA.isdisjoint(node.target.tags)
    return node.target is operator.getitem or autograd_function(node) not in (None, "AccumulateGrad")
