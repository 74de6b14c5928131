"""torch's dispatcher: ops and their schemas, dispatch keys, functionalization, tensors that have no data.

A tree is nested tuples, lists and dicts with values at its leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch, _pytree

from compile_fsdp.torch_compat.declarations import needs, needs_attributes

# What the targets of call_function nodes are, besides plain functions: an op with its overload, an op with all of its
# overloads, and an op that takes graphs. (2.13.0)
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
needs_attributes(OpOverload, "_schema")

# The copy-in of a reduction, which pads each tensor's rows to a multiple of the ranks. (2.13.0)
chunk_cat = torch.ops.aten._chunk_cat

# What `scaled_dot_product_attention` becomes, by device and by what it can use there. (2.13.0)
attention_ops = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)

# Makes tensors without data, on any device. (2.13.0)
FakeTensorMode = fake_tensor.FakeTensorMode

# Sees every op below autograd. (2.13.0)
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Whether a tensor is of a subclass that wraps others, and tells which. (2.13.0)
is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# The leaves of a tree, and a tree with a function applied to leaves of one type. (2.13.0)
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only

# Whether an op has a kernel for exactly this dispatch key, both by name; fallbacks and the kernels of alias keys do not
# count. (2.13.0)
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

# Functionalization's tensor wrapper: is it one, apply the writes it has pending, take it off. (2.13.0)
_is_functional_tensor = torch._is_functional_tensor
_sync: Callable[[torch.Tensor], None] = torch._sync  # type: ignore[attr-defined]
_from_functional_tensor = torch._from_functional_tensor

# Functionalization's dispatch key. (2.13.0)
_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

# The dispatch keys that are on, and those that are off, where no op's kernel runs. (2.13.0)
_DISPATCH_KEYS_OF_EAGER_CODE = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)

# The address of a storage's own object. (2.13.0)
needs_attributes(torch.UntypedStorage, "_cdata")


class ArgumentAliasing(NamedTuple):
    """What an op's schema declares about one argument."""

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


def returns_nothing(op: OpOverload) -> bool:
    """Whether the op is called only for what it writes. (2.13.0)"""
    return not op._schema.returns


def op_schema(op: OpOverload) -> str:
    """`namespace::op(arguments) -> returns`, as torch prints it. (2.13.0)"""
    return str(op._schema)


def op_name(op: OpOverload | HigherOrderOperator) -> str:
    """`namespace::op`, with `.overload` if it has one; of a higher-order op only `op`. (2.13.0)"""
    return str(op.name())  # type: ignore[no-untyped-call]


def packet_overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    """Every overload of an op. (2.13.0)"""
    return tuple(getattr(packet, name) for name in packet.overloads())


@needs("torch.utils.flop_counter.flop_registry")
def flop_formula(op: OpOverload) -> Callable[..., int] | None:
    """Counts the floating-point operations of a call from its arguments and result, if torch can. (2.13.0)"""
    from torch.utils.flop_counter import flop_registry

    return cast("Callable[..., int] | None", flop_registry.get(op.overloadpacket))


@needs("torch._C._ForceDispatchKeyGuard")
def plain_dispatch() -> contextlib.AbstractContextManager[None]:
    """Inside an op's kernel: run code as if it was called from eager Python, with autograd and version counters.

    The dispatcher calls a kernel with the layers above it switched off. (2.13.0)
    """
    return torch._C._ForceDispatchKeyGuard(*_DISPATCH_KEYS_OF_EAGER_CODE)


@needs("torch._C._ExcludeDispatchKeyGuard")
def below_functionalization() -> contextlib.AbstractContextManager[None]:
    """Within it, ops reach the kernels below functionalization. (2.13.0)"""
    return torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE)


def unwrap_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that functionalization wraps, with its pending writes; any other tensor as it is. (2.13.0)"""
    if not _is_functional_tensor(tensor):
        return tensor
    _sync(tensor)
    return _from_functional_tensor(tensor)


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree; in place of a subclass that wraps others, those. (2.13.0)"""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            parts: Any = value
            if is_wrapper_subclass(parts):
                yield from plain_tensors([getattr(parts, name) for name in parts.__tensor_flatten__()[0]])
            else:
                yield value


def storage_key(tensor: torch.Tensor) -> int | None:
    """Equal for tensors, fake ones too, on one storage while both live; None without a storage. (2.13.0)"""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def is_checkpoint(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph runs the body of a checkpoint of the user's. (2.13.0)"""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint
