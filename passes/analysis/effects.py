"""Writes and aliasing of nodes in a functionalized graph.

[Note: A node is guilty until its schema acquits it]
Only an operator's schema, or the schemas of everything that a higher-order op runs, prove that a node does not write
its inputs. A callable without such a proof counts as writing every tensor that it takes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import SymBool, SymFloat, SymInt, fx

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.torch_compat.dispatch import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    argument_aliasing,
    op_name,
    packet_overloads,
)

_aten = torch.ops.aten

# Tags of ops whose results have sizes, or are numbers, that depend on data.
DEPENDS_ON_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})

# They take a mutable op, and by definition return the tensors that it would have written.
_FUNCTIONAL_HIGHER_ORDER_OPS = frozenset(
    {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"}
)

# Views that their schemas do not declare.
_UNDECLARED_VIEWS = frozenset({"_c10d_functional::wait_tensor", "aten::_unsafe_view"})

# Ops whose result depends on the place of a tensor in its storage, or on the size of the storage.
_STORAGE_OPS = frozenset(
    {
        _aten.as_strided.default,
        _aten.as_strided_.default,
        _aten.as_strided_copy.default,
        _aten.as_strided_scatter.default,
        _aten.sym_storage_offset.default,
        _aten.set_.source_Tensor,
    }
)


def is_call_to(node: fx.Node, op: OpOverload) -> bool:
    """Return whether the node calls this op: its overload after AOTAutograd, its packet before."""
    return node.target is op or node.target is op.overloadpacket


def is_resize(node: fx.Node) -> bool:
    return is_call_to(node, resize_storage_bytes_)


def find_resizes(graph: fx.Graph) -> list[fx.Node]:
    """Return the graph's resizes, unordered, without visiting all nodes."""
    targets = (resize_storage_bytes_, resize_storage_bytes_.overloadpacket)
    return [n for t in targets for n in graph.find_nodes(op="call_function", target=t, sort=False)]


def is_copy(node: fx.Node) -> bool:
    return is_call_to(node, copy_)


def parameter_of(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a resize or copy writes; None for all other nodes."""
    if not (is_resize(node) or is_copy(node)):
        return None
    written = get_argument(node, 0, "variable" if is_resize(node) else "tensor")
    return written if isinstance(written, fx.Node) else None


def get_argument(node: fx.Node, position: int, name: str) -> object:
    """Return an argument of a call, passed by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def nodes_in(argument: object) -> Iterator[fx.Node]:
    return (leaf for leaf in _leaves(argument) if isinstance(leaf, fx.Node))


def is_barrier(node: fx.Node, effects: Effects) -> bool:
    """Return whether the node may write, and is no resize or fill."""
    return not (is_resize(node) or is_copy(node)) and bool(effects.written_inputs(node))


# Arguments of an op: the name of each, and its position, None for a keyword.
_Arguments = tuple[tuple[str, int | None], ...]


def _nodes_passed(node: fx.Node, arguments: _Arguments) -> tuple[fx.Node, ...]:
    """Return the nodes that a call passes in some of its op's arguments."""
    values = [node.args[i] if i is not None and i < len(node.args) else node.kwargs.get(n) for n, i in arguments]
    return tuple(nodes_in(values))


@dataclass(frozen=True, slots=True)
class _Schema:
    written: _Arguments
    aliased: _Arguments


@dataclass(frozen=True, slots=True)
class _Summary:
    """Possible effects of a subgraph on its higher-order op's inputs."""

    writes: bool
    reads_storage: bool


class Effects:
    """Effects of a graph's nodes; analyses each operator and subgraph once."""

    def __init__(self, module: fx.GraphModule | None) -> None:
        self._module = module  # owner of the graph, and of the subgraphs of its higher-order ops
        self._schemas: dict[int, _Schema] = {}  # by id, because an op outlives the graph, and is slow to hash
        self._summaries: dict[int, _Summary] = {}

    def find_written(self, graph: fx.Graph) -> set[fx.Node]:
        """Return every node whose data or storage the graph may change."""
        return {written for node in graph.nodes for written in self.written_inputs(node)}

    def only_computes(self, node: fx.Node) -> bool:
        """Return whether a node is an aten op that writes nothing."""
        op = node.target
        return isinstance(op, OpOverload) and op.namespace == "aten" and not self.written_inputs(node)

    def written_inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the inputs whose data or storage the node may change."""
        if node.op in ("placeholder", "get_attr", "output"):
            return ()
        target = node.target
        if isinstance(target, OpOverload):
            return _nodes_passed(node, self._schema(target).written)
        if isinstance(target, OpOverloadPacket):  # Only before AOTAutograd.
            return tuple(n for op in packet_overloads(target) for n in _nodes_passed(node, self._schema(op).written))
        if target is operator.getitem:
            return ()
        if isinstance(target, HigherOrderOperator) and not self._summary_of_call(node).writes:
            return ()
        values = ((each, each.meta.get("val", each.meta.get("example_value"))) for each in node.all_input_nodes)
        return [each for each, value in values if not isinstance(value, (int, float, SymInt, SymFloat, SymBool))]

    def view_inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the inputs that the node's results alias, by its schema."""
        return _nodes_passed(node, self._schema(node.target).aliased) if isinstance(node.target, OpOverload) else ()

    def has_result(self, node: fx.Node) -> bool:
        if isinstance(node.target, OpOverload):
            return bool(node.target._schema.returns)
        if isinstance(node.target, OpOverloadPacket):
            return any(op._schema.returns for op in packet_overloads(node.target))
        return node.op != "output"

    def reads_storage(self, node: fx.Node) -> bool:
        """Return whether the node may see more than its inputs' elements."""
        if isinstance(node.target, HigherOrderOperator):
            return self._summary_of_call(node).reads_storage
        return node.target in _STORAGE_OPS

    def subgraph(self, node: fx.Node) -> fx.GraphModule | None:
        """Return the graph module behind a get_attr node, or None."""
        if node.op != "get_attr":
            return None
        found: object = self._module
        for name in str(node.target).split("."):
            found = getattr(found, name, None)
        return found if isinstance(found, fx.GraphModule) else None

    def _schema(self, op: OpOverload) -> _Schema:
        if (known := self._schemas.get(id(op))) is None:
            known = self._schemas[id(op)] = _read_schema(op)
        return known

    def _summary_of_call(self, node: fx.Node) -> _Summary:
        assert isinstance(node.target, HigherOrderOperator)
        name = op_name(node.target)
        if name in _FUNCTIONAL_HIGHER_ORDER_OPS:
            # It rebuilds views of an operand with as_strided.
            return _Summary(writes=False, reads_storage=name == "auto_functionalized_v2")
        runs = [self._summary_of_callable(item) for item in _leaves((node.args, node.kwargs))]
        found = [summary for summary in runs if summary is not None]
        # Nothing tells the effects of a higher-order op that names neither an op nor a subgraph.
        if not found:
            return _Summary(writes=True, reads_storage=True)
        return _Summary(any(each.writes for each in found), any(each.reads_storage for each in found))

    def _summary_of_callable(self, item: object) -> _Summary | None:
        if isinstance(item, OpOverload):
            return _Summary(writes=bool(self._schema(item).written), reads_storage=item in _STORAGE_OPS)
        if isinstance(item, (HigherOrderOperator, OpOverloadPacket)):
            return _Summary(writes=True, reads_storage=True)
        module = self.subgraph(item) if isinstance(item, fx.Node) else None
        return None if module is None else self._summary_of_module(module)

    def _summary_of_module(self, module: fx.GraphModule) -> _Summary:
        if (known := self._summaries.get(id(module))) is None:
            inner = type(self)(module)
            known = self._summaries[id(module)] = _Summary(
                writes=any(inner.written_inputs(node) for node in module.graph.nodes),
                reads_storage=any(inner.reads_storage(node) for node in module.graph.nodes),
            )
        return known


def _read_schema(op: OpOverload) -> _Schema:
    arguments = argument_aliasing(op)
    written = {a.name for a in arguments if a.written}
    aliased = {a.name for a in arguments if a.aliased}
    if op is resize_storage_bytes_:  # Its schema declares no mutation.
        written = {arguments[0].name}
    if op_name(op).startswith("aten::set_."):  # Afterwards, a write to either tensor writes both.
        written = {a.name for a in arguments}
    if op_name(op) in _UNDECLARED_VIEWS:
        aliased = {arguments[0].name}

    def select(names: set[str]) -> _Arguments:
        return tuple((a.name, None if a.keyword_only else i) for i, a in enumerate(arguments) if a.name in names)

    return _Schema(select(written), select(aliased))


def _leaves(argument: object) -> Iterator[object]:
    if isinstance(argument, (tuple, list, dict)):
        for item in argument.values() if isinstance(argument, dict) else argument:
            yield from _leaves(item)
    else:
        yield argument
