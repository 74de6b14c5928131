"""Unsharded parameters that an all-gather extension makes tensor subclasses.

[Note: Parts of a subclass]
If an extension makes a tensor subclass of the gathered tensors, the graph fills and frees the plain tensors that the
subclass lists in `__tensor_flatten__`, and builds the subclass from these parts. Each part is a separate tensor on the
memory of torch's unsharded parameter. The autograd leaf is a plain tensor that never has memory and gets the gradient
of the whole subclass.

[Note: Parts that are not gathered]
A part can come from the shard or from the extension's metadata: a scale, or a table of constants. Some extensions write
it in every gather into `out`, torch's unsharded parameter, which then holds the graph's part. Others, such as that of
torchao's NF4Tensor, leave it alone. Then torch's parameter keeps its own tensor, which nobody frees, and the graph's
part is a copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.autograd import preserve_version_counter
from compile_fsdp.torch_compat.dispatch import PLAIN_TYPES, is_wrapper_subclass, storage_key
from compile_fsdp.torch_compat.distributed import local_tensor
from compile_fsdp.torch_compat.fsdp import FSDPParam, free_storage


def is_extended(param: FSDPParam) -> bool:
    """Return whether the shard is a tensor subclass with an all-gather extension."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def find_subclass(param: FSDPParam) -> type[torch.Tensor] | None:
    """Return the tensor subclass that an extension made of a parameter, also in a DTensor; None for a plain tensor."""
    kind = type(local_tensor(param._unsharded_param.data))
    return None if kind in PLAIN_TYPES else kind


def has_plain_parts(param: FSDPParam) -> bool:
    """Return whether an unsharded subclass lists its parts and all parts are plain tensors."""
    whole: Any = local_tensor(param._unsharded_param)
    return is_wrapper_subclass(whole) and all(
        type(getattr(whole, name)) in PLAIN_TYPES for name in whole.__tensor_flatten__()[0]
    )


class Extension:
    """All-gather extension of one parameter's shard."""

    def __init__(self, param: FSDPParam) -> None:
        kind: Any = type(param._sharded_local_tensor)
        # Plain functions, because Dynamo traces into them but makes a tensor's method a graph node.
        self.pre_all_gather: Callable[..., Any] = kind.fsdp_pre_all_gather
        self.post_all_gather: Callable[..., Any] = kind.fsdp_post_all_gather
        # Whether `pre_all_gather` takes five arguments instead of only the mesh.
        self.takes_all_arguments = len(inspect.signature(self.pre_all_gather).parameters) == 6
        # While a gather is in flight: metadata that `pre_all_gather` returned for `post_all_gather`, and sizes of its
        # tensors.
        self.metadata: Any = None
        self.sizes: list[torch.Size] = []

    def inputs(self, param: FSDPParam) -> list[torch.Tensor]:
        """Return the all-gather inputs, 1-D tensors on the group's device."""
        shard: Any = param._sharded_local_tensor
        if param.offload_to_cpu:
            shard = shard.to(param.device, non_blocking=True)
        if self.takes_all_arguments:
            module, size, stride = param._module_info.module, param._orig_size, param._contiguous_orig_stride
            inputs, self.metadata = self.pre_all_gather(shard, param.shard_mesh, size, stride, module, param.mp_policy)
        else:
            inputs, self.metadata = self.pre_all_gather(shard, param.shard_mesh)
        self.sizes = [each.size() for each in inputs]
        return [each.reshape(-1) for each in inputs]

    def values(
        self, param: FSDPParam, unsharded_param: torch.Tensor, parts: Parts | None, gathered: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the values of the parts, or of a plain parameter, from all ranks' inputs, each (ranks, numel)."""
        shard: Any = param._sharded_local_tensor
        outputs = [
            rows.reshape(rows.shape[0] * size[0], *size[1:]) for rows, size in zip(gathered, self.sizes, strict=True)
        ]
        metadata, self.metadata, self.sizes = self.metadata, None, []
        if parts is not None:
            return parts.take(shard, metadata, *outputs)
        value: torch.Tensor
        value, _ = self.post_all_gather(shard, tuple(outputs), metadata, param.param_dtype or param.orig_dtype)
        length = unsharded_param.shape[0]
        return [value if value.shape[0] == length else value[:length]]

    @at_run_time
    def write(self, param: FSDPParam) -> None:
        """Let `post_all_gather` write into torch's unsharded parameter, as in a gather of torch's own."""
        self.inputs(param)
        pairs = zip(param.all_gather_outputs, self.sizes, strict=True)
        gathered = tuple(output.view(-1, *size[1:]) for output, size in pairs)
        metadata, self.metadata, self.sizes = self.metadata, None, []
        dtype = param.param_dtype or param.orig_dtype
        self.post_all_gather(param._sharded_local_tensor, gathered, metadata, dtype, out=param._unsharded_param)


class Parts:
    """Parts of an unsharded parameter. See [Note: Parts of a subclass]."""

    def __init__(self, param: FSDPParam, extension: Extension) -> None:
        whole: Any = local_tensor(param._unsharded_param)
        self._whole = whole
        self._names: list[str] = whole.__tensor_flatten__()[0]
        # Builds the subclass from the leaf, which gets its gradient, and the parts.
        self.join = _joins(whole)
        # Computes the parts from the shard, the extension's metadata and the gathered inputs.
        self.take = _takes(whole, extension.post_all_gather, param.param_dtype or param.orig_dtype)
        freed_by_torch = (*param.all_gather_outputs, *param._unsharded_inner_tensors)
        bases = {storage_key(each): each for each in freed_by_torch}
        others = [name for name in self._names if storage_key(getattr(whole, name)) not in bases]
        # Names of parts as in [Note: Parts that are not gathered], of which torch's parameter keeps its own tensors.
        self._left_alone = set(others) - _written_in_gathers(param, extension, others) if others else set()
        self.tensors: list[torch.Tensor] = []  # the parts, in the order of `__tensor_flatten__`
        self.storage_bytes: list[int] = []  # of each part
        for name in self._names:
            part = getattr(whole, name).detach()
            if name not in others:
                base = bases[storage_key(part)]
            else:
                part = base = part.clone()
                if name not in self._left_alone:
                    # torch then frees this part, too, and allocates it before the extension writes it.
                    param._unsharded_inner_tensors = [*param._unsharded_inner_tensors, part]
            if name not in self._left_alone:
                setattr(whole, name, part)
            self.tensors.append(part)
            self.storage_bytes.append(base.numel() * base.itemsize)

    @at_run_time
    def adopt(self, is_unsharded: bool) -> None:
        """Put the parts back where the extension put new tensors; take over their values if the group is unsharded."""
        for name, part, size in zip(self._names, self.tensors, self.storage_bytes, strict=True):
            given = getattr(self._whole, name)
            if given is part:
                continue
            if is_unsharded:
                part.untyped_storage().resize_(size)
                with torch.no_grad(), preserve_version_counter(part):
                    part.copy_(given)
            if name not in self._left_alone:
                setattr(self._whole, name, part)


@at_run_time
def _written_in_gathers(param: FSDPParam, extension: Extension, names: Sequence[str]) -> set[str]:
    """Return those of an unsharded subclass's parts that the extension writes or replaces if it gets `out`."""
    whole: Any = local_tensor(param._unsharded_param)
    owned = (*param.all_gather_outputs, *param._unsharded_inner_tensors)
    freed = [each for each in owned if each.untyped_storage().nbytes() == 0]
    before = [getattr(whole, name) for name in names]
    with torch.no_grad(), preserve_version_counter(owned):
        for tensor in freed:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            tensor.zero_()  # the extension may compute with it
        versions = [each._version for each in before]
        extension.write(param)
    changed = {
        name
        for name, tensor, version in zip(names, before, versions, strict=True)
        if getattr(whole, name) is not tensor or tensor._version != version
    }
    for tensor in freed:
        free_storage(tensor)
    return changed


def _joins(whole: Any) -> Callable[..., torch.Tensor]:
    kind, (names, context), size, stride = type(whole), whole.__tensor_flatten__(), whole.size(), whole.stride()

    def whole_of(*parts: torch.Tensor) -> torch.Tensor:
        built: torch.Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
        return built

    def join(leaf: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return _Join.apply(leaf, whole_of, *parts)  # type: ignore[no-any-return, no-untyped-call]

    # In the graph as one call, because Dynamo cannot construct every subclass.
    marked: Callable[..., torch.Tensor] = torch.compiler.allow_in_graph(join)
    return marked


def _takes(
    whole: Any, post_all_gather: Callable[..., Any], dtype: torch.dtype
) -> Callable[..., tuple[torch.Tensor, ...]]:
    (names, _), size, stride = whole.__tensor_flatten__(), whole.size(), whole.stride()

    def take(shard: torch.Tensor, metadata: Any, *gathered: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            value, _ = post_all_gather(shard, gathered, metadata, dtype)
            value = torch.as_strided(value, size, stride)  # removes the padding, as torch does
        return tuple(getattr(value, name) for name in names)

    marked: Callable[..., tuple[torch.Tensor, ...]] = torch.compiler.allow_in_graph(take)
    return marked


def split_leaf(whole: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a plain leaf without memory, and a copy of a tensor subclass that gives its gradient to the leaf.

    Compiled autograd accumulates gradients with ops that some subclasses lack.
    """
    leaf = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device, requires_grad=True)
    free_storage(leaf.data)
    parts = [getattr(whole, name).detach() for name in whole.__tensor_flatten__()[0]]
    with torch.enable_grad():
        return leaf, _joins(whole)(leaf, *parts)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, whole_of: Callable[..., torch.Tensor], *parts: torch.Tensor) -> Any:
        ctx.others = 1 + len(parts)
        return whole_of(*parts)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor | None, ...]:
        return grad, *(None,) * ctx.others
