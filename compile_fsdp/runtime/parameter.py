"""Traced counterpart of an FSDP2 parameter: all-gather inputs, unsharded tensor, registration, gradient.

[Note: One object for life]
The unsharded parameter is created once, before the first traced use, with an empty storage. A traced step
resizes that storage and copies the gathered value into it, so that the parameter is never an alias of a gather
buffer at a graph boundary. The pass `remove_unshard_copies` removes both ops if the graph proves that no code outside
of it can see their effect.

[Note: Leaves are plain]
The autograd leaf of a graph is always a plain tensor with its own storage. If a parameter is a DTensor (tensor
parallelism), `DTensor.from_local` builds it from the leaf inside the graph. The backward of `from_local` brings the
gradient to the parameter's placements. No DTensor crosses a graph boundary. Other tensor subclasses follow
[Note: Parts of a subclass].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.attached import accumulated_gradient, set_accumulated_gradient
from compile_fsdp.runtime.checks import check_shard, check_unsharded
from compile_fsdp.runtime.dtensor_parameters import wraps_as_dtensor
from compile_fsdp.runtime.gather import Input
from compile_fsdp.runtime.post_forward_shard import PostForwardShard
from compile_fsdp.runtime.subclass_parameters import Parts, find_subclass, is_extended
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.distributed import local_tensor
from compile_fsdp.torch_compat.dynamo import mark_static
from compile_fsdp.torch_compat.fsdp import FSDPParam, ShardedState, data_parallel_dims, free_storage, unsharded_spec


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """Constants of one parameter, equal on every rank because shard sizes include the padding.

    Attributes:
        size: Size of the unsharded parameter; for a DTensor, of its local tensor.
        shard_size: Size of a rank's padded shard.
        shard_dim: The sharded dim.
        storage_bytes: Bytes, with padding, of each tensor that a gather fills: the unsharded parameter, or its parts.
        is_cast: Whether the shard is cast before the all-gather.
    """

    size: tuple[int, ...]
    shard_size: tuple[int, ...]
    shard_dim: int
    storage_bytes: tuple[int, ...]
    is_cast: bool

    @property
    def shard_numel(self) -> int:
        """Number of elements of the padded shard."""
        return math.prod(self.shard_size)


class TraceableParam:
    """The traced counterpart of one FSDPParam.

    Attributes:
        fsdp_param: torch's parameter, which holds the tensors.
        unsharded_param: Unsharded parameter that graphs read, a plain tensor. See [Note: Leaves are plain].
        plan: Constants of the parameter.
        is_watched: Whether the hook on the unsharded parameter's gradient is registered.
        wrap: Builds the DTensor that modules hold, if its mesh includes the data-parallel dims; else None.
        post_forward: Shard of the smaller mesh that `reshard_after_forward=<int>` keeps; None without a smaller mesh.
        parts: Parts of an unsharded parameter that is a tensor subclass; else None. See [Note: Parts of a subclass].
        extended: Whether the shard is a tensor subclass with an all-gather extension (fsdp_pre_all_gather).
        pre_all_gather: The extension's `fsdp_pre_all_gather`, as a function; None without an extension.
        post_all_gather: The extension's `fsdp_post_all_gather`, as a function; None without an extension.
        takes_all_arguments: Whether `pre_all_gather` takes five arguments instead of only the mesh.
        metadata: Value that `pre_all_gather` returned for `post_all_gather`; None if no gather is in flight.
        gather_sizes: Sizes of the tensors that `pre_all_gather` returned; empty if no gather is in flight.
    """

    unsharded_param: nn.Parameter
    plan: ParamPlan

    def __init__(self, fsdp_param: FSDPParam) -> None:
        self.fsdp_param = fsdp_param
        self.is_watched = False
        self.wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.post_forward: PostForwardShard | None = None
        self.parts: Parts | None = None
        self.extended = False
        self.pre_all_gather: Callable[..., Any] | None = None
        self.post_all_gather: Callable[..., Any] | None = None
        self.takes_all_arguments = False
        self.metadata: Any = None
        self.gather_sizes: list[torch.Size] = []

    # Setup, before anything is traced

    @at_run_time
    def prepare(self, shard_count: int, device: torch.device) -> None:
        """Create the empty unsharded parameter, and the constants that tracing needs."""
        param = self.fsdp_param
        self.extended = is_extended(param)
        if self.extended:
            check_shard(param)
            extension: Any = type(param._sharded_local_tensor)
            # Plain functions, because Dynamo traces into them but makes a tensor's method a graph node.
            self.pre_all_gather = extension.fsdp_pre_all_gather
            self.post_all_gather = extension.fsdp_post_all_gather
            self.takes_all_arguments = len(inspect.signature(self.pre_all_gather).parameters) == 6
        if not hasattr(param, "_unsharded_param"):
            self._create_unsharded(shard_count, device)
        else:
            check_unsharded(param)
        unsharded = param._unsharded_param
        if not hasattr(self, "unsharded_param"):
            self.unsharded_param = self._create_leaf(unsharded)
        for tensor in (unsharded, self.unsharded_param):
            tensor.requires_grad_(param.sharded_param.requires_grad)
        # torch.compile(dynamic=True) would make shard sizes symbols, and unify them with an equal batch size.
        for shard in (param._sharded_param_data, param.sharded_param, local_tensor(param.sharded_param)):
            mark_static(shard)
        padded_bytes = param.padded_sharded_param_size.numel() * shard_count * self.unsharded_param.itemsize
        self.plan = ParamPlan(
            size=tuple(param._orig_size),
            shard_size=tuple(param.padded_sharded_param_size),
            shard_dim=param.fsdp_placement.dim,
            storage_bytes=(padded_bytes,) if self.parts is None else tuple(self.parts.storage_bytes),
            is_cast=param.param_dtype is not None,
        )
        if dims := data_parallel_dims(param):
            self.wrap = wraps_as_dtensor(unsharded_spec(param), dims)

    @at_run_time
    def _create_unsharded(self, shard_count: int, device: torch.device) -> None:
        param = self.fsdp_param
        if self.extended:
            inputs = param.all_gather_inputs
            numels, dtypes = [each.numel() for each in inputs], [each.dtype for each in inputs]
        else:
            numels, dtypes = [param._sharded_param_data.numel()], [param.param_dtype or param.orig_dtype]
        param.init_all_gather_outputs(numels, dtypes, shard_count, device)
        for output in param.all_gather_outputs if self.extended else []:
            output.zero_()  # the extension computes with this output
        param.init_unsharded_param()
        check_unsharded(param)
        param.free_unsharded_param()
        if find_subclass(param) is None:
            free_storage(local_tensor(param._unsharded_param))

    def _create_leaf(self, unsharded: nn.Parameter) -> nn.Parameter:
        param = self.fsdp_param
        if find_subclass(param) is not None:
            assert self.post_all_gather is not None
            is_empty = param.sharded_state is not ShardedState.UNSHARDED
            self.parts = Parts(param, self.post_all_gather)
            if is_empty:
                self.parts.free()
            leaf = nn.Parameter(torch.empty(param._orig_size, dtype=unsharded.dtype, device=unsharded.device))
            free_storage(leaf.data)
            return leaf
        # For a DTensor, detach() gives a separate leaf on the storage of its local tensor.
        return nn.Parameter(local_tensor(unsharded).detach()) if param.is_dtensor else unsharded

    @at_run_time
    def prepare_post_forward(self, shard_count: int) -> None:
        """Create the empty shard of the smaller mesh that `reshard_after_forward=<int>` keeps."""
        if self.post_forward is None:
            self.post_forward = PostForwardShard(
                self.fsdp_param, self.unsharded_param, shard_count, self.plan.storage_bytes[0]
            )

    @at_run_time
    def watch_gradient(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Register `hook` to run with the unsharded parameter after its gradient is accumulated.

        Does nothing for a frozen parameter. Compiled autograd traces the hook where it accumulates the gradient. A
        plain hook would get the gradient itself, but on 2.13 it breaks compiled autograd if there is no gradient.
        """
        if self.unsharded_param.requires_grad and not self.is_watched:
            self.is_watched = True
            self.unsharded_param.register_post_accumulate_grad_hook(hook)

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameter has memory."""
        sizes = (tensor.untyped_storage().nbytes() for tensor in self.filled)
        return all(size >= full for size, full in zip(sizes, self.plan.storage_bytes, strict=True))

    @property
    def filled(self) -> list[torch.Tensor]:
        """Tensors that a gather fills: the unsharded parameter, or its parts."""
        return [self.unsharded_param] if self.parts is None else self.parts.tensors

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameter."""
        needs_grad = self.fsdp_param.sharded_param.requires_grad
        if hasattr(self, "unsharded_param") and self.unsharded_param.requires_grad != needs_grad:
            self.unsharded_param.requires_grad_(needs_grad)

    # All-gather

    def gather_input(self, is_post_forward: bool) -> torch.Tensor:
        """Return this rank's 1-D all-gather input without extension, before move and cast."""
        if is_post_forward:
            assert self.post_forward is not None
            return self.post_forward.data
        return self.fsdp_param._sharded_param_data  # (shard_numel,)

    @at_run_time
    def input(self) -> Input:
        """Describe how all ranks' shards form the unsharded value."""
        plan, dtype = self.plan, self.unsharded_param.dtype
        kind = "rows" if plan.shard_dim == 0 else "columns"
        return Input(plan.shard_numel, dtype, plan.is_cast, kind, plan.size, plan.shard_size, plan.shard_dim)

    @at_run_time
    def post_forward_input(self) -> Input:
        """Describe how the shards of the smaller mesh form the unsharded value."""
        assert self.post_forward is not None
        return Input(self.post_forward.data.numel(), self.unsharded_param.dtype, kind="flat", size=self.plan.size)

    def extended_inputs(self) -> list[torch.Tensor]:
        """Return the extension's all-gather inputs, 1-D tensors on the group's device."""
        param = self.fsdp_param
        assert self.pre_all_gather is not None
        shard: Any = param._sharded_local_tensor
        if param.offload_to_cpu:
            shard = shard.to(param.device, non_blocking=True)
        if self.takes_all_arguments:
            module, size, stride = param._module_info.module, param._orig_size, param._contiguous_orig_stride
            inputs, self.metadata = self.pre_all_gather(shard, param.shard_mesh, size, stride, module, param.mp_policy)
        else:
            inputs, self.metadata = self.pre_all_gather(shard, param.shard_mesh)
        self.gather_sizes = [each.size() for each in inputs]
        return [each.reshape(-1) for each in inputs]

    def extended_values(self, gathered: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values to fill `filled` with, computed by the extension.

        Args:
            gathered: All ranks' inputs, each (ranks, numel of the input).
        """
        assert self.post_all_gather is not None
        param = self.fsdp_param
        shard: Any = param._sharded_local_tensor
        outputs = [
            rows.reshape(rows.shape[0] * size[0], *size[1:])
            for rows, size in zip(gathered, self.gather_sizes, strict=True)
        ]
        metadata, self.metadata, self.gather_sizes = self.metadata, None, []
        if self.parts is not None:
            return self.parts.take(shard, metadata, *outputs)
        value: torch.Tensor
        value, _ = self.post_all_gather(shard, tuple(outputs), metadata, param.param_dtype or param.orig_dtype)
        length = self.unsharded_param.shape[0]
        return [value if value.shape[0] == length else value[:length]]

    # Memory

    def keep_slice(self, shard_count: int, rank: torch.Tensor) -> None:
        """Keep this rank's slice of the unsharded parameter over the post-forward mesh."""
        assert self.post_forward is not None
        self.post_forward.fill(self.fsdp_param, self.unsharded_param, shard_count, rank)

    def free_post_forward(self) -> None:
        """Free the slice over the post-forward mesh."""
        assert self.post_forward is not None
        self.post_forward.free(self.fsdp_param)

    @at_run_time
    def reset(self) -> None:
        """Free everything but the sharded parameter, regardless of the state, and drop the gradient."""
        param = self.fsdp_param
        set_accumulated_gradient(param, None)
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
            unsharded.grad = None
        if not hasattr(self, "unsharded_param"):
            return  # never traced: torch's own reset frees it
        if self.post_forward is not None:
            self.post_forward.free(param)
        for tensor in self.filled:
            free_storage(tensor.data)
        self.unsharded_param.grad = None
        self.register_sharded()

    # Registration in the modules

    def register_sharded(self) -> None:
        """Register the sharded parameter."""
        self._register(self.fsdp_param.sharded_param)

    def register_unsharded(self) -> None:
        """Register the tensor that the graph computes with."""
        leaf: torch.Tensor = self.unsharded_param
        if self.parts is not None:
            leaf = self.parts.join(leaf, *self.parts.tensors)
        if not self.fsdp_param.is_dtensor:
            self._register(leaf)
            return
        # See [Note: Leaves are plain].
        if self.wrap is not None:
            self._register(self.wrap(leaf))
            return
        spec = unsharded_spec(self.fsdp_param)
        assert spec.tensor_meta is not None
        self._register(
            DTensor.from_local(
                leaf,
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=spec.tensor_meta.shape,
                stride=spec.tensor_meta.stride,
            )
        )

    def register_left_unsharded(self) -> None:
        """Register torch's unsharded parameter for eager code, after a graph that does not reshard."""
        if self.fsdp_param.is_dtensor or self.parts is not None:
            self._register(self.fsdp_param._unsharded_param)

    def register_post_forward(self) -> None:
        """Register the parameter over the smaller mesh."""
        assert self.post_forward is not None
        self._register(self.post_forward.parameter)

    def _register(self, value: torch.Tensor) -> None:
        info = self.fsdp_param._module_info
        info.module._parameters[info.param_name] = value  # type: ignore[assignment]
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            module._parameters[name] = value  # type: ignore[assignment]

    # Gradients

    def take_gradient(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Take the unsharded gradient of this backward and of earlier microbatches.

        Args:
            dtype: Dtype to cast this backward's gradient to; None to keep its dtype.
        Returns:
            The sum, a plain tensor; None if there is no gradient.
        """
        param = self.fsdp_param
        grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if grad is not None and dtype is not None:
            grad = grad.to(dtype)
        earlier = accumulated_gradient(param)  # in the reduce dtype
        if earlier is not None:
            set_accumulated_gradient(param, None)
        elif param.is_dtensor or self.parts is not None:
            earlier, param._unsharded_param.grad = param._unsharded_param.grad, None
        if earlier is None:
            return grad
        if isinstance(earlier, DTensor):
            earlier = earlier.to_local()
        return earlier if grad is None else earlier + grad

    @at_run_time
    def hand_back_gradient(self) -> None:
        """Move an unreduced gradient to torch's unsharded parameter, if that is not `unsharded_param`."""
        param = self.fsdp_param
        grad, unsharded = self.unsharded_param.grad, param._unsharded_param
        if unsharded is self.unsharded_param or grad is None:
            return
        self.unsharded_param.grad = None
        if param.is_dtensor:
            spec = unsharded_spec(param)
            grad = DTensor.from_local(
                grad, spec.mesh, spec.placements, run_check=False, shape=unsharded.shape, stride=unsharded.stride()
            )
        unsharded.grad = grad if unsharded.grad is None else unsharded.grad + grad
