"""One parameter of FSDP2 while it is traced: what it sends, what it is filled with, who holds it.

[Note: One object for life]
The unsharded parameter is created once, before the first traced use, with an empty storage. A traced step
resizes that storage and copies the gathered value into it, so that the parameter is never an alias of a gather
buffer at a graph boundary. `passes/remove_unshard_copies.py` takes both ops out again where a graph proves that
nobody outside of it can see them.

[Note: Leaves are plain]
The autograd leaf of a graph is always a plain tensor with a storage of its own. A parameter that is a DTensor
(tensor parallelism) is put together from it inside the graph, by `DTensor.from_local`, whose backward brings the
gradient to the parameter's own placements. No DTensor crosses a graph boundary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.compat import (
    FSDPParam,
    ShardedState,
    accumulated_gradient,
    free_storage,
    local_tensor,
    mark_static,
    set_accumulated_gradient,
    unsharded_spec,
)
from compile_fsdp.ops import copy_
from compile_fsdp.runtime.checks import check_unsharded
from compile_fsdp.runtime.gather import Input


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """The constants of one parameter: equal on every rank, since only padded sizes enter.

    Attributes:
        size: Of the unsharded parameter; of its local part, for a DTensor.
        shard_size: Of one rank's padded shard.
        shard_dim: The sharded dim.
        storage_bytes: Of the unsharded parameter, with its padding.
        is_cast: Whether the shard is cast before it is sent.
    """

    size: tuple[int, ...]
    shard_size: tuple[int, ...]
    shard_dim: int
    storage_bytes: int
    is_cast: bool

    @property
    def shard_numel(self) -> int:
        """Elements of the padded shard."""
        return math.prod(self.shard_size)


class TraceableParam:
    """The traced branch of one FSDPParam.

    Attributes:
        leaf: The unsharded parameter that graphs read, plain. See [Note: Leaves are plain].
        extended: The shard is a tensor subclass that decides itself what is gathered (fsdp_pre_all_gather).
    """

    leaf: nn.Parameter
    plan: ParamPlan

    def __init__(self, param: FSDPParam) -> None:
        self.param = param
        self.extended = False
        self.pre_all_gather: Callable[..., Any] | None = None
        self.post_all_gather: Callable[..., Any] | None = None
        self.takes_all_arguments = False  # of fsdp_pre_all_gather: five, and not the mesh alone
        self.metadata: Any = None  # what fsdp_pre_all_gather hands on, from a launch to its end
        self.gather_sizes: list[torch.Size] = []  # of what it returned
        self.post_forward: _PostForwardShard | None = None

    # Setting up, for real and before anything is traced

    def prepare(self, shard_count: int, device: torch.device) -> None:
        """Create the unsharded parameter, empty, and the constants that tracing needs."""
        param = self.param
        self.extended = hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        if self.extended:
            extension: Any = type(param._sharded_local_tensor)
            # As plain functions Dynamo traces into them; a method of a tensor would become a node of the graph.
            self.pre_all_gather = extension.fsdp_pre_all_gather
            self.post_all_gather = extension.fsdp_post_all_gather
            self.takes_all_arguments = len(inspect.signature(self.pre_all_gather).parameters) == 6
        if not hasattr(param, "_unsharded_param"):
            self._create_unsharded(shard_count, device)
        else:
            check_unsharded(param)
        unsharded = param._unsharded_param
        if not hasattr(self, "leaf"):
            # .detach() of an inner tensor: a leaf of its own on the same storage.
            self.leaf = nn.Parameter(local_tensor(unsharded).detach()) if param.is_dtensor else unsharded
        for tensor in (unsharded, self.leaf):
            tensor.requires_grad_(param.sharded_param.requires_grad)
        # With torch.compile(dynamic=True) sizes of shards would become symbols, one with the batch's if they are equal.
        for shard in (param._sharded_param_data, param.sharded_param, local_tensor(param.sharded_param)):
            mark_static(shard)
        self.plan = ParamPlan(
            size=tuple(param._orig_size),
            shard_size=tuple(param.padded_sharded_param_size),
            shard_dim=param.fsdp_placement.dim,
            storage_bytes=param.padded_sharded_param_size.numel() * shard_count * self.leaf.itemsize,
            is_cast=param.param_dtype is not None,
        )

    def _create_unsharded(self, shard_count: int, device: torch.device) -> None:
        param = self.param
        if self.extended:
            inputs = param.all_gather_inputs
            numels, dtypes = [each.numel() for each in inputs], [each.dtype for each in inputs]
        else:
            numels, dtypes = [param._sharded_param_data.numel()], [param.param_dtype or param.orig_dtype]
        param.init_all_gather_outputs(numels, dtypes, shard_count, device)
        for output in param.all_gather_outputs if self.extended else []:
            output.zero_()  # the extension computes with them
        param.init_unsharded_param()
        check_unsharded(param)
        param.free_unsharded_param()
        free_storage(local_tensor(param._unsharded_param))

    def prepare_post_forward(self, shard_count: int) -> None:
        """Create the shard of the smaller mesh that `reshard_after_forward=<int>` keeps, empty."""
        if self.post_forward is None:
            self.post_forward = _PostForwardShard(self.param, self.leaf, shard_count, self.plan)

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameter has its memory."""
        return self.leaf.untyped_storage().nbytes() >= self.plan.storage_bytes

    def follow_trainable(self) -> None:
        """For real: let the unsharded parameter need a gradient as the sharded one does now."""
        if hasattr(self, "leaf") and self.leaf.requires_grad != self.param.sharded_param.requires_grad:
            self.leaf.requires_grad_(self.param.sharded_param.requires_grad)

    # All-gather

    def gather_input(self, is_post_forward: bool) -> torch.Tensor:
        """What this rank sends of a parameter that is not extended: 1-D, before it is moved and cast."""
        if is_post_forward:
            assert self.post_forward is not None
            return self.post_forward.data
        return self.param._sharded_param_data  # (shard_numel,)

    def input(self) -> Input:
        """For real: what is made of all ranks' `gather_input`s."""
        plan = self.plan
        kind = "rows" if plan.shard_dim == 0 else "columns"
        return Input(plan.shard_numel, self.leaf.dtype, plan.is_cast, kind, plan.size, plan.shard_size, plan.shard_dim)

    def post_forward_input(self) -> Input:
        """For real: the same over the smaller mesh."""
        assert self.post_forward is not None
        return Input(self.post_forward.data.numel(), self.leaf.dtype, kind="flat", size=self.plan.size)

    def extended_inputs(self) -> list[torch.Tensor]:
        """What an extension sends: 1-D tensors on the group's device."""
        param = self.param
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

    def extended_value(self, gathered: list[torch.Tensor]) -> torch.Tensor:
        """What an extension makes of all ranks' inputs, each (ranks, numel of the input)."""
        assert self.post_all_gather is not None
        param = self.param
        shard: Any = param._sharded_local_tensor
        outputs = [
            rows.reshape(rows.shape[0] * size[0], *size[1:])
            for rows, size in zip(gathered, self.gather_sizes, strict=True)
        ]
        dtype = param.param_dtype or param.orig_dtype
        value: torch.Tensor
        value, _ = self.post_all_gather(shard, tuple(outputs), self.metadata, dtype)
        self.metadata, self.gather_sizes = None, []
        length = self.leaf.shape[0]
        return value if value.shape[0] == length else value[:length]

    # States

    def free_post_forward(self) -> None:
        assert self.post_forward is not None
        self.post_forward.free(self.param)

    def reset(self) -> None:
        """For real: free everything there may be, whatever the state says, and drop the gradient."""
        param = self.param
        set_accumulated_gradient(param, None)
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
            unsharded.grad = None
        if not hasattr(self, "leaf"):
            return  # never traced: torch's own reset has freed it
        if self.post_forward is not None:
            self.post_forward.free(param)
        free_storage(self.leaf.data)
        self.leaf.grad = None
        param.sharded_state = ShardedState.SHARDED
        self.register_sharded()

    def keep_slice(self, shard_count: int, rank: torch.Tensor) -> None:
        """Keep this rank's slice of the unsharded parameter over the post-forward mesh."""
        assert self.post_forward is not None
        self.post_forward.fill(self.param, self.leaf, shard_count, rank)

    # Who the modules hold

    def register_sharded(self) -> None:
        self._register(self.param.sharded_param)

    def register_unsharded(self) -> None:
        """Register what the graph computes with."""
        if not self.param.is_dtensor:
            self._register(self.leaf)
            return
        spec = unsharded_spec(self.param)
        assert spec.tensor_meta is not None
        # See [Note: Leaves are plain].
        self._register(
            DTensor.from_local(
                self.leaf,
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=spec.tensor_meta.shape,
                stride=spec.tensor_meta.stride,
            )
        )

    def register_kept(self) -> None:
        """Register what eager code finds after a graph that leaves the parameter unsharded."""
        if self.param.is_dtensor:
            self._register(self.param._unsharded_param)

    def register_post_forward(self) -> None:
        assert self.post_forward is not None
        self._register(self.post_forward.parameter)

    def _register(self, value: torch.Tensor) -> None:
        info = self.param._module_info
        info.module._parameters[info.param_name] = value  # type: ignore[assignment]
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            module._parameters[name] = value  # type: ignore[assignment]

    # Gradients

    def take_gradient(self) -> torch.Tensor | None:
        """The unsharded gradient of this backward and of microbatches before it, plain; None if there is none."""
        param = self.param
        grad, self.leaf.grad = self.leaf.grad, None
        earlier = accumulated_gradient(param)  # in the reduce dtype
        if earlier is not None:
            set_accumulated_gradient(param, None)
        elif param.is_dtensor:
            earlier, param._unsharded_param.grad = param._unsharded_param.grad, None
        if earlier is None:
            return grad
        if isinstance(earlier, DTensor):
            earlier = earlier.to_local()
        return earlier if grad is None else earlier + grad

    def hand_back_gradient(self) -> None:
        """For real: give a gradient that was not reduced to the DTensor parameter, where torch looks for it."""
        param = self.param
        grad = self.leaf.grad
        if not param.is_dtensor or grad is None:
            return
        self.leaf.grad = None
        unsharded = param._unsharded_param
        spec = unsharded_spec(param)
        wrapped = DTensor.from_local(
            grad, spec.mesh, spec.placements, run_check=False, shape=unsharded.shape, stride=unsharded.stride()
        )
        unsharded.grad = wrapped if unsharded.grad is None else unsharded.grad + wrapped


class _PostForwardShard:
    """A rank's part of one parameter over the smaller mesh, between forward and backward.

    Attributes:
        data: (padded numel of the parameter / ranks of the smaller mesh,), without memory at other times.
        parameter: The same as a DTensor parameter, for the modules to hold.
    """

    def __init__(self, param: FSDPParam, leaf: nn.Parameter, shard_count: int, plan: ParamPlan) -> None:
        self.padded_numel_text = str(plan.storage_bytes // leaf.itemsize)
        self.data = torch.empty(int(self.padded_numel_text) // shard_count, dtype=leaf.dtype, device=leaf.device)
        self.bytes_text = str(self.data.untyped_storage().nbytes())
        view = self.data.as_strided(param.sharded_post_forward_size, param.contiguous_sharded_post_forward_stride)
        self.parameter = nn.Parameter(
            param.to_sharded_post_forward_dtensor(view), requires_grad=param.sharded_param.requires_grad
        )
        mark_static(self.data)
        free_storage(self.data)

    def fill(self, param: FSDPParam, leaf: torch.Tensor, shard_count: int, rank: torch.Tensor) -> None:
        if int(self.bytes_text) > 0:
            flat = leaf.reshape(-1)
            missing = int(self.padded_numel_text) - flat.numel()
            if missing > 0:
                flat = torch.cat([flat, flat.new_zeros(missing)])
            self.data.untyped_storage().resize_(int(self.bytes_text))
            # The rank is an input, and not a number: graphs are equal on all ranks.
            copy_(self.data, flat.view(shard_count, -1).index_select(0, rank).view(-1))
        param._sharded_post_forward_param_data = self.data
        param._sharded_post_forward_param = self.parameter

    def free(self, param: FSDPParam) -> None:
        if int(self.bytes_text) > 0:
            self.data.untyped_storage().resize_(0)
        param._sharded_post_forward_param_data = None
        param._sharded_post_forward_param = None
