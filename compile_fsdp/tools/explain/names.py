"""Map inputs and results of a Dynamo graph to parameter FQNs.

Graphs made from the Dynamo graph no longer tell these names. Shards and unsharded parameters are known by the tensors
behind their placeholders, and a reduced gradient by the parameter that the unsharded gradient was accumulated for. A
name comes from following the data, never from an order or a size. Data that cannot be followed has no name.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_fsdp.ops import accumulate_gradient, reduce_scatter_tensor
from compile_fsdp.passes.analysis.module_names import module_fqn
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.torch_compat.dispatch import chunk_cat
from compile_fsdp.torch_compat.distributed import functional_collectives
from compile_fsdp.torch_compat.dynamo import graph_input_example
from compile_fsdp.wrap.tree import ROOT

_REDUCTIONS = (
    reduce_scatter_tensor,
    functional_collectives.reduce_scatter_tensor,
    functional_collectives.reduce_scatter_tensor.default,
)
NO_MODULE = "(no module)"
_SUMS = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Names and sizes of one parameter group."""

    name: str  # FQN of the group's module, or FQNs of its modules
    parameters: tuple[str, ...]  # FQNs
    parameter_bytes: tuple[int, ...]  # of each parameter, unsharded and padded
    shard_bytes: int  # of the group's shards on this rank, padding included
    trained_bytes: int  # of those that need a gradient
    ranks: int  # that the group is sharded over
    reshards: bool  # whether eager FSDP2 reshards the group after its forward

    @property
    def unsharded_bytes(self) -> int:
        return sum(self.parameter_bytes)

    def of_model(self, model: str) -> GroupFacts:
        parameters = tuple(add_model(model, fqn) for fqn in self.parameters)
        return replace(self, name=add_model(model, self.name), parameters=parameters)


@dataclass(frozen=True, slots=True)
class GraphNames:
    """Parameter FQNs by position among the inputs and the results of a Dynamo graph."""

    shards: dict[int, str]
    unsharded: dict[int, str]
    gradients: dict[int, str]


def add_model(model: str, fqns: str) -> str:
    """Put a model's name before FQNs, as in "Model.0, Model" for "0, the root"; an empty name changes nothing."""
    if not model or fqns == NO_MODULE:
        return fqns
    return ", ".join(model if fqn == ROOT else f"{model}.{fqn}" for fqn in fqns.split(", "))


def describe_group(group: TraceableGroup) -> GroupFacts:
    shards = [param.gather_input(is_post_forward=False) for param in group.params]
    shard_bytes = [shard.numel() * shard.itemsize for shard in shards]
    return GroupFacts(
        name=group.fsdp_group._module_fqn or ROOT,
        parameters=tuple(group.fqn(param.unsharded_param) for param in group.params),
        parameter_bytes=tuple(sum(param.storage_bytes) for param in group.params),
        shard_bytes=sum(shard_bytes),
        trained_bytes=sum(
            size
            for size, param in zip(shard_bytes, group.params, strict=True)
            if param.fsdp_param.sharded_param.requires_grad
        ),
        ranks=group.constants.shard_count,
        reshards=group.fsdp_group.post_forward_mesh_info is not None,
    )


def name_graph(gm: fx.GraphModule, models: Mapping[TraceableGroup, str]) -> GraphNames:
    """Find the names for a Dynamo graph during its compilation.

    `models` has the graph's groups, with the name of a model that goes before the FQNs of each; see `add_model`.
    """
    tensors: dict[int, tuple[str, bool]] = {}  # by id of the tensor: FQN, whether the tensor is the shard
    for group, model in models.items():
        for param in group.params:
            fqn = add_model(model, group.fqn(param.unsharded_param))
            for tensor in param.filled:
                tensors[id(tensor)] = fqn, False
            tensors[id(param.gather_input(is_post_forward=False))] = fqn, True
    names = GraphNames({}, {}, {})
    of_node: dict[tuple[fx.Node, int], str] = {}  # unsharded parameters by placeholder and item of its list
    position = 0
    for node in gm.graph.find_nodes(op="placeholder"):
        example = graph_input_example(node)
        for item, tensor in enumerate(example if isinstance(example, list) else [example]):
            fqn, is_shard = tensors.get(id(tensor), ("", False))
            if fqn and is_shard:
                names.shards[position] = fqn
            elif fqn:
                names.unsharded[position] = of_node[node, item] = fqn
            position += 1
    results = gm.graph.output_node().args[0]
    for index, node in enumerate(results if isinstance(results, (tuple, list)) else ()):
        if isinstance(node, fx.Node) and (found := _find_gradient(node, of_node)) is not None:
            names.gradients[index] = found
    return names


def _find_gradient(
    node: fx.Node, unsharded: dict[tuple[fx.Node, int], str], item: int = 0, *, reduced: bool = False
) -> str | None:
    """FQN of the parameter whose reduced gradient a node, or this item of its list, holds; None if it is not known.

    `reduced`: whether the data has passed a reduction behind the node.
    """
    while node.target is not accumulate_gradient:
        inputs = node.all_input_nodes
        if node.target in (chunk_cat, chunk_cat.default):
            parts: Any = node.args[0]
            part = parts[item] if isinstance(parts, (tuple, list)) and item < len(parts) else None
            if not isinstance(part, fx.Node):
                return None
            node = part
            continue
        if node.target in _SUMS:  # with the gradient of earlier microbatches
            found = (_find_gradient(each, unsharded, item, reduced=reduced) for each in inputs)
            return next(filter(None, found), None)
        if len(inputs) != 1:
            return None
        if node.target is operator.getitem and isinstance(node.args[1], int):
            item = node.args[1]
        reduced = reduced or node.target in _REDUCTIONS
        node = inputs[0]
    source: Any = node.args[1]
    position: Any = 0
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source, position = source.args
    return unsharded.get((source, position)) if reduced else None


def module_names(graph: fx.Graph, known: Callable[[fx.Node], str], is_backward: bool) -> dict[fx.Node, str]:
    """FQN of the innermost module of each node; without metadata, a module of the data that the node computes with.

    Such a node gets the FQN that its operands have in common, or that of its newest operand. A node whose operands have
    no module gets that of its readers. `known` gives the FQN by the parameters of a node, or "". A forward outside of
    all modules is the root's own, unless a compiled function calls the root.
    """
    is_called = any(module_fqn(node, 0) == "" for node in graph.nodes)
    outside = "" if is_backward else NO_MODULE if is_called else ROOT
    inputs = graph.find_nodes(op="placeholder")
    found = dict.fromkeys(inputs[:1], ROOT) if is_backward else {}  # the gradient of the outermost module's result
    for node in graph.nodes:
        fqn = module_fqn(node)
        name = ROOT if fqn == "" else fqn or known(node) or (node.stack_trace and outside)
        operands = [found[each] for each in sorted(node.all_input_nodes) if each in found]
        if name or operands:
            found[node] = name or common_module(operands) or operands[-1]
    for node in reversed(graph.nodes):
        if node not in found and (readers := [found[user] for user in node.users if user in found]):
            found[node] = common_module(readers) or readers[0]
    return found


def common_module(modules: Iterable[str]) -> str:
    """The longest FQN that contains all modules, or "" if there is none but the root."""
    columns = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))
