"""torch's dispatcher: ops and their schemas, dispatch keys, fake tensors.

A tree is nested tuples, lists and dicts with values at its leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch, _pytree

from compile_fsdp.torch_compat.declarations import Late, needs, needs_attributes

# Targets of call_function nodes besides plain functions: one overload of an op, an op with all its overloads, and an
# op that takes graphs. (2.13.0)
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
needs_attributes(OpOverload, "_schema")
needs_attributes(OpOverloadPacket, "_qualified_op_name")

# The copy-in of a reduce-scatter. It pads each tensor's rows to a multiple of the number of ranks. (2.13.0)
chunk_cat = torch.ops.aten._chunk_cat

# Copies each tensor of a list into its place, and casts it. (2.13.0)
foreach_copy = torch._foreach_copy_

# The kernels that `scaled_dot_product_attention` chooses from, by device and by their constraints. (2.13.0)
attention_ops = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)

# The gradients of these kernels that torch marks as random, although only the forward draws numbers. (2.13.0)
attention_gradients = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    }
)

# Key in the meta of a checkpoint's body, for the user's `context_fn` that selects the saved values. (2.13.0)
CHECKPOINT_CONTEXTS = "_checkpoint_context_fn"

# Makes fake tensors, which have no data, for any device. (2.13.0)
FakeTensorMode = fake_tensor.FakeTensorMode
_FakeTensor = fake_tensor.FakeTensor

# The types of tensors that have no parts: a plain tensor, and the fake tensor that stands for it. (2.13.0)
PLAIN_TYPES = (torch.Tensor, _FakeTensor)

# Intercepts every op below autograd. (2.13.0)
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Whether a tensor's subclass wraps inner tensors and names them by `__tensor_flatten__`. (2.13.0)
is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# The leaves of a tree, and a tree with a function applied to leaves of one type. (2.13.0)
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only

# Whether an op has a kernel for exactly this dispatch key, both given by name. Fallbacks and kernels of alias keys do
# not count. (2.13.0)
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

# Dispatch keys included, and dispatch keys excluded, outside any op's kernel. (2.13.0)
_DISPATCH_KEYS_OF_EAGER_CODE = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())

# The address of a storage's C++ object. (2.13.0)
needs_attributes(torch.UntypedStorage, "_cdata")


class ArgumentAliasing(NamedTuple):
    """Aliasing that an op's schema declares for an argument."""

    name: str
    keyword_only: bool
    written: bool
    aliased: bool  # by a result, as far as the schema tells


def argument_aliasing(op: OpOverload) -> tuple[ArgumentAliasing, ...]:
    """The declared aliasing of each argument, in schema order. (2.13.0)"""
    return tuple(
        ArgumentAliasing(
            name=argument.name,
            keyword_only=argument.kwarg_only,
            written=argument.alias_info is not None and argument.alias_info.is_write,
            aliased=argument.alias_info is not None,
        )
        for argument in op._schema.arguments
    )


def read_argument(node: torch.fx.Node, name: str) -> Any:
    """The argument of a call of an op, or its default, by its name in the op's schema. (2.13.0)"""
    assert isinstance(node.target, OpOverload)
    position, argument = next((i, each) for i, each in enumerate(node.target._schema.arguments) if each.name == name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)


def op_name(op: OpOverload | HigherOrderOperator) -> str:
    """`namespace::op`, with `.overload` if it has an overload name; only `op` for a higher-order op. (2.13.0)"""
    return str(op.name())  # type: ignore[no-untyped-call]


def packet_overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    """Every overload of an op. (2.13.0)"""
    return tuple(getattr(packet, name) for name in packet.overloads())


_custom_ops = Late("torch._library.custom_ops.OPDEFS")
_triton_kernels = Late("torch._higher_order_ops.triton_kernel_wrap.kernel_side_table")


def op_definitions(node: torch.fx.Node) -> list[Any]:
    """The Python functions of a `torch.library.custom_op` that a node calls, or its Triton kernel. (2.13.0)"""
    op = node.target
    if isinstance(op, HigherOrderOperator) and "kernel_idx" in node.kwargs:
        return [_triton_kernels.value.get_kernel(node.kwargs["kernel_idx"])]
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        return []
    name = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    definition = _custom_ops.value.get(name)
    return [] if definition is None else [each for each in vars(definition).values() if type(each) is FunctionType]


_free_unbacked_symbols = Late("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")
_flop_registry = Late("torch.utils.flop_counter.flop_registry")


def flop_formula(op: OpOverload) -> Callable[..., int] | None:
    """torch's formula for the flops of a call, given its arguments and result; None if it has none. (2.13.0)"""
    return cast("Callable[..., int] | None", _flop_registry.value.get(op.overloadpacket))


@needs("torch._C._ForceDispatchKeyGuard")
def plain_dispatch() -> contextlib.AbstractContextManager[None]:
    """Run code in an op's kernel as in eager Python, with autograd and version counters. (2.13.0)

    Without this context the dispatch keys above the kernel are excluded.
    """
    return torch._C._ForceDispatchKeyGuard(*_DISPATCH_KEYS_OF_EAGER_CODE)


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in a tree; wrapper subclasses are replaced by their inner tensors. (2.13.0)"""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            parts: Any = value
            if is_wrapper_subclass(parts):
                yield from plain_tensors([getattr(parts, name) for name in parts.__tensor_flatten__()[0]])
            else:
                yield value


def is_plain_fake(value: object) -> bool:
    """Whether a value is a strided fake tensor, no subclass of it, whose sizes do not depend on data. (2.13.0)"""
    return isinstance(value, _FakeTensor) and value.layout is torch.strided and not _free_unbacked_symbols(value)


def storage_key(tensor: torch.Tensor) -> int | None:
    """A key equal for live tensors, fake or real, that share a storage; None without a storage. (2.13.0)"""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


@needs("torch._C._storage_Use_Count")
def count_holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors and other objects that hold a storage. (2.13.0)"""
    return int(torch._C._storage_Use_Count(storage._cdata))


def is_checkpoint(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph runs the body of a user's activation checkpoint. (2.13.0)"""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def forget_recomputation(node: torch.fx.Node) -> None:
    """Take away the marks by which AOTAutograd runs ops of a checkpoint again. (2.13.0)"""
    for key in ("recompute", "ac_graph_id"):
        node.meta.pop(key, None)
