"""Reads, writes and ordering of nodes in a Dynamo-level graph.

[Note: Names tell the writes]
Before AOTAutograd a graph calls torch functions, operators and tensor methods, which have no schema, but whose names
follow rules. A function whose name ends in an underscore, and an in-place operator, write their first argument; `out=`
and `inplace=` declare a write. A callable from outside of torch may do anything.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from compile_fsdp.ops import run_block
from compile_fsdp.passes.analysis.effects import Effects, is_copy, is_resize, nodes_in
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket, packet_overloads
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version

# Pieces of the names of torch functions that draw random numbers. Attention has a dropout argument.
_RANDOM_NAMES = (
    "rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform", "exponential", "cauchy",
    "geometric", "gumbel", "rrelu", "attention", "seed", "rng",
)  # fmt: skip

# Torch functions that write an argument: statistics, or a renormalized table.
_WRITES_ARGUMENTS = ("batch_norm", "instance_norm", "embedding")

# Dynamo writes `tensor.T` as a getattr, and arithmetic on sizes as calls to the remaining builtins.
_PURE_BUILTINS = frozenset({getattr, abs, bool, float, int, len, max, min, pow, round, sum})

_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
        "irshift", "isub", "itruediv", "ixor", "setitem", "delitem",
    )
)  # fmt: skip


def is_version_op(node: fx.Node) -> bool:
    """Return whether the node reads or sets version counters, which concern a tensor's history, not its data."""
    return node.target is tensor_version or is_version_setter(node)


def is_upkeep(node: fx.Node) -> bool:
    """Return whether a node fills or frees a parameter, or reads or sets version counters, without computing."""
    return is_resize(node) or is_copy(node) or is_version_op(node)


def is_version_setter(node: fx.Node) -> bool:
    return node.target is set_version_counter


def is_passed_through(node: fx.Node) -> bool:
    """Return whether the node is an input, or compiled autograd's prologue of an AOTAutograd backward, or its item.

    The prologue returns all saved tensors and gradients without reading their data.
    """
    source = node.args[0] if node.target is operator.getitem else node
    return is_input(node) or (isinstance(source, fx.Node) and target_name(source) == "call_aot_bwd_prologue")


def is_input(node: fx.Node) -> bool:
    """Return whether the node is a placeholder, or an item of a placeholder, as compiled autograd passes inputs."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.op == "placeholder"


def is_autocast_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and "autocast" in target_name(node)


def is_grad_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and target_name(node) == "_set_grad_enabled"


def is_mode_switch(node: fx.Node) -> bool:
    """Return whether the node changes what later ops compute, as autocast, inference mode and functorch do."""
    if node.op != "call_function" or is_grad_switch(node) or is_version_setter(node):
        return False
    name, owner = target_name(node), str(getattr(node.target, "__module__", ""))
    is_setter = name.startswith(("_set_", "set_", "enable_"))
    return is_autocast_switch(node) or is_setter or "functorch" in owner or "inference_mode" in name


def switched_attention(node: fx.Node) -> tuple[list[str], bool] | None:
    """Return the backends that the node allows attention, as `sdpa_kernel` does, and whether in this order."""
    if node.op != "call_function" or target_name(node) != "_sdpa_kernel":
        return None
    backends, by_priority = node.args
    return [str(each.args[0]) for each in nodes_in(backends)], bool(by_priority)


class EagerEffects(Effects):
    """`Effects` that also understands torch functions, operators and tensor methods."""

    def written_inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the inputs that the node may write; see [Note: Names tell the writes]."""
        if node.target is run_block:
            return ()
        if not is_torch_function(node):
            return super().written_inputs(node)
        name = target_name(node)
        if any(piece in name for piece in _WRITES_ARGUMENTS):
            return node.all_input_nodes
        is_inplace = node.target in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        first = node.args[:1] if is_inplace or name == "__setitem__" or _is_inplace(node) else ()
        return tuple(nodes_in((first, node.kwargs.get("out"))))

    def is_ordered(self, node: fx.Node) -> bool:
        """Return whether the node may run a random op, so that it keeps its order among random ops."""
        if node.op not in ("call_function", "call_method", "call_module"):
            return False
        if isinstance(node.target, OpOverload):
            return _is_seeded(node.target)
        if isinstance(node.target, OpOverloadPacket):
            return any(map(_is_seeded, packet_overloads(node.target)))
        return not is_torch_function(node) or any(piece in target_name(node) for piece in _RANDOM_NAMES)


def _is_seeded(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def is_torch_function(node: fx.Node) -> bool:
    """Return whether the node calls a tensor method, torch or `operator`."""
    if node.op != "call_function":
        return node.op == "call_method"
    if isinstance(node.target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    if node.target in _PURE_BUILTINS:
        return True
    # A method of torch's C++ classes has no module; its class has.
    owner = getattr(node.target, "__objclass__", None)
    module = str(getattr(node.target, "__module__", None) or getattr(owner, "__module__", ""))
    return module.split(".")[0] in ("torch", "_operator") and not module.startswith("torch.distributed")


def _is_inplace(node: fx.Node) -> bool:
    """Return whether the argument `inplace`, which may come by position, is true."""
    # Not by inspect.signature(), which takes a millisecond for a function in C++, and those have no such argument.
    code = getattr(inspect.unwrap(cast(Any, node.target)), "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    if "inplace" in names[: len(node.args)]:
        return bool(node.args[names.index("inplace")])
    return bool(node.kwargs.get("inplace"))


def is_embedding(node: fx.Node) -> bool:
    return target_name(node) in ("embedding", "embedding_bag")


def target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
