"""Costs and saved tensors of one op of a Dynamo graph.

An op runs alone, on fake tensors: the bytes that its kernels read and write, and the tensors that its backward saves,
follow from sizes and dtypes. Ops with equal calls run once, so repeated blocks cost as much time as one block.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, fx

from compile_fsdp.passes.analysis.aliases import call_target, fake_arguments, fake_value
from compile_fsdp.passes.analysis.collectives import is_collective
from compile_fsdp.passes.analysis.eager_effects import is_torch_function
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.torch_compat.dispatch import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    argument_aliasing,
    flop_formula,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from compile_fsdp.torch_compat.inductor import is_decomposed, is_fused


class Kind(enum.Enum):
    """How the compiler treats an op."""

    VIEW = enum.auto()  # only another view of its inputs
    FUSED = enum.auto()  # pointwise ops and reductions, which are computed together with what reads them
    HEAVY = enum.auto()  # a kernel of its own: its inputs and results are in memory


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Costs and saved tensors of one op."""

    kind: Kind
    saved_inputs: frozenset[int]  # positions, in `tensor_arguments`, of the inputs that autograd saves
    saves_result: bool  # autograd saves a result
    internal_bytes: int  # that autograd saves besides inputs and results
    flops: int  # floating-point operations of the forward
    moved_bytes: int  # that the forward reads and writes
    is_repeatable: bool  # a second run computes equal results


def tensor_arguments(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node takes, each once."""
    return list({id(each): each for each in _tensors(fake_arguments((node.args, node.kwargs)))}.values())


def result_tensors(node: fx.Node) -> list[torch.Tensor]:
    return list(_tensors(fake_value(node)))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))


class OpMeasure:
    """Measure ops; ops with equal calls are measured once.

    If `fuses`, ops that Inductor decomposes into pointwise ops and reductions count as fused; otherwise only the
    partitioner's fusible ops do.
    """

    def __init__(self, *, fuses: bool = True) -> None:
        self._fuses = fuses
        self._known: dict[Hashable, OpFacts] = {}
        self._mode = FakeTensorMode()

    def facts(self, node: fx.Node) -> OpFacts:
        """Return the facts of an op; an op that cannot run alone is assumed to save its inputs."""
        arguments = fake_arguments((node.args, node.kwargs))
        if not _can_run(node, arguments):
            return _unknown(node)
        order = {id(each): i for i, each in enumerate(tensor_arguments(node))}
        same = [order[id(each)] for each in _tensors(arguments)]
        key = node.op, node.target, str(fx.node.map_aggregate(arguments, _describe)), str(same)
        if (facts := self._known.get(key)) is None:
            try:
                facts = self._run(node, arguments)
            except Exception:  # ops reject fake tensors by arbitrary exceptions
                facts = _unknown(node)
            self._known[key] = facts
        return facts

    def _run(self, node: fx.Node, arguments: Any) -> OpFacts:
        with self._mode, torch.enable_grad():
            inputs = {id(each): _stand_in(each) for each in tensor_arguments(node)}
            args, kwargs = tree_map_only(torch.Tensor, lambda each: inputs[id(each)], arguments)
            args, kwargs = tree_map_only((SymInt, SymFloat, SymBool), _hint, (args, kwargs))
            saved: list[torch.Tensor] = []
            seen = _SeenOps(self._fuses)

            def save(tensor: torch.Tensor) -> torch.Tensor:
                saved.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), seen:
                result = call_target(node.target, args, kwargs)
        results = {storage_key(each) for each in _tensors(result)}
        positions = {storage_key(each): i for i, each in enumerate(inputs.values())}
        internal = {key: each for each in saved if (key := storage_key(each)) not in positions.keys() | results}
        computed = results - positions.keys()
        is_in_place = not computed and seen.kind is not Kind.VIEW
        moved = [*inputs.values(), *_tensors(result)] if seen.kind is not Kind.VIEW else []
        return OpFacts(
            kind=seen.kind,
            saved_inputs=frozenset(positions[key] for each in saved if (key := storage_key(each)) in positions),
            saves_result=any(storage_key(each) in computed for each in saved),
            internal_bytes=sum(each.untyped_storage().nbytes() for each in internal.values()),
            flops=seen.flops,
            moved_bytes=sum(each.numel() * each.itemsize for each in moved),
            is_repeatable=seen.is_repeatable and not is_in_place,
        )


class _SeenOps(TorchDispatchMode):
    """Record the ops that run below one op of a Dynamo graph."""

    def __init__(self, fuses: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fuses = fuses
        self.kind = Kind.VIEW
        self.flops = 0
        self.is_repeatable = True

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if list(_tensors(result)) and not _is_view(op):
            if (formula := flop_formula(op)) is not None:
                self.flops += formula(*args, **kwargs, out_val=result)
            if formula is not None or not (is_fused(op) or (self._fuses and is_decomposed(op))):
                self.kind = Kind.HEAVY
            elif self.kind is Kind.VIEW:
                self.kind = Kind.FUSED
            self.is_repeatable &= torch.Tag.nondeterministic_seeded not in op.tags
        return result


def _is_view(op: OpOverload) -> bool:
    aliasing = argument_aliasing(op)
    return any(each.aliased for each in aliasing) and not any(each.written for each in aliasing)


def _can_run(node: fx.Node, arguments: Any) -> bool:
    """Return whether the node calls torch on plain tensors, and no collective; other calls have unknown effects."""
    is_torch = isinstance(node.target, OpOverload) or is_torch_function(node)
    has_subclass = any(hasattr(each, "__tensor_flatten__") for each in _tensors(arguments))
    return is_torch and not is_collective(node) and not has_subclass


def _unknown(node: fx.Node) -> OpFacts:
    tensors = tensor_arguments(node)
    moved = sum(size_hint(each.numel()) * each.itemsize for each in [*tensors, *result_tensors(node)])
    return OpFacts(Kind.HEAVY, frozenset(range(len(tensors))), False, 0, 0, moved, is_repeatable=False)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    size, stride = map(size_hint, tensor.shape), map(size_hint, tensor.stride())
    made = torch.empty_strided(tuple(size), tuple(stride), dtype=tensor.dtype, device=tensor.device)
    if not tensor.requires_grad:
        return made
    # An activation is no leaf, nor a view of a leaf, so in-place ops may write it.
    memory = made.new_empty(made.untyped_storage().nbytes() // made.itemsize, requires_grad=True).clone()
    return memory.as_strided(made.shape, made.stride())


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size, stride = tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride()))
        return size, stride, value.dtype, value.device, value.requires_grad
    return _hint(value)


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, (SymInt, SymFloat, SymBool)) else value
