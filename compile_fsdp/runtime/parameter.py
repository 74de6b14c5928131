"""One parameter of FSDP2 while it is traced: what it sends, what it is filled with, who holds it.

[Note: One object for life]
The unsharded parameter is created once, before the first traced use, with an empty storage. A traced step
resizes that storage and copies the gathered value into it, so that the parameter is never an alias of a gather
buffer at a graph boundary. The pass `remove_unshard_copies` takes both ops out again where a graph proves that nobody
outside of it can see them.

[Note: Leaves are plain]
The autograd leaf of a graph is always a plain tensor with a storage of its own. A parameter that is a DTensor
(tensor parallelism) is put together from it inside the graph, by `DTensor.from_local`, whose backward brings the
gradient to the parameter's own placements. No DTensor crosses a graph boundary. For other tensor subclasses see
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
    """The constants of one parameter: equal on every rank, since only padded sizes enter.

    Attributes:
        size: Of the unsharded parameter; of its local part, for a DTensor.
        shard_size: Of one rank's padded shard.
        shard_dim: The sharded dim.
        storage_bytes: By tensor that a gather fills, with its padding: the unsharded parameter, or its parts.
        is_cast: Whether the shard is cast before it is sent.
    """

    size: tuple[int, ...]
    shard_size: tuple[int, ...]
    shard_dim: int
    storage_bytes: tuple[int, ...]
    is_cast: bool

    @property
    def shard_numel(self) -> int:
        """Elements of the padded shard."""
        return math.prod(self.shard_size)


class TraceableParam:
    """The traced counterpart of one FSDPParam.

    Attributes:
        fsdp_param: torch's parameter, which has the tensors.
        unsharded_param: The unsharded parameter that graphs read, plain. See [Note: Leaves are plain].
        plan: Its constants.
        is_watched: Whether the hook on the unsharded parameter's gradient is registered.
        wrap: Makes the DTensor that modules hold, where its mesh has the data-parallel dims as well; else None.
        post_forward: Its shard of the smaller mesh that `reshard_after_forward=<int>` keeps; None without one.
        parts: Of an unsharded parameter that is a tensor subclass. See [Note: Parts of a subclass].
        extended: Whether the shard is a tensor subclass that decides itself what is gathered (fsdp_pre_all_gather).
        pre_all_gather: That method of the subclass, as a function.
        post_all_gather: Its counterpart behind the gather.
        takes_all_arguments: Whether `pre_all_gather` takes five arguments, and not the mesh alone.
        metadata: What `pre_all_gather` hands on to `post_all_gather`, while a gather is on its way.
        gather_sizes: The sizes of what `pre_all_gather` returned, while a gather is on its way.
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

    # Setting up, before anything is traced

    @at_run_time
    def prepare(self, shard_count: int, device: torch.device) -> None:
        """Create the unsharded parameter, empty, and the constants that tracing needs."""
        param = self.fsdp_param
        self.extended = is_extended(param)
        if self.extended:
            check_shard(param)
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
        if not hasattr(self, "unsharded_param"):
            self.unsharded_param = self._create_leaf(unsharded)
        for tensor in (unsharded, self.unsharded_param):
            tensor.requires_grad_(param.sharded_param.requires_grad)
        # With torch.compile(dynamic=True) sizes of shards would become symbols, one with the batch's if they are equal.
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
            output.zero_()  # the extension computes with them
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
        # .detach() of an inner tensor: a leaf of its own on the same storage.
        return nn.Parameter(local_tensor(unsharded).detach()) if param.is_dtensor else unsharded

    @at_run_time
    def prepare_post_forward(self, shard_count: int) -> None:
        """Create the shard of the smaller mesh that `reshard_after_forward=<int>` keeps, empty."""
        if self.post_forward is None:
            self.post_forward = PostForwardShard(
                self.fsdp_param, self.unsharded_param, shard_count, self.plan.storage_bytes[0]
            )

    @at_run_time
    def watch_gradient(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Have `hook` called with the unsharded parameter once its gradient is accumulated, if it gets one.

        Compiled autograd traces the hook where it accumulates the gradient. A plain hook would get the gradient
        itself, but on 2.13 it breaks compiled autograd for a parameter without one.
        """
        if self.unsharded_param.requires_grad and not self.is_watched:
            self.is_watched = True
            self.unsharded_param.register_post_accumulate_grad_hook(hook)

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameter has its memory."""
        sizes = (tensor.untyped_storage().nbytes() for tensor in self.filled)
        return all(size >= full for size, full in zip(sizes, self.plan.storage_bytes, strict=True))

    @property
    def filled(self) -> list[torch.Tensor]:
        """What a gather fills: the unsharded parameter, or its parts."""
        return [self.unsharded_param] if self.parts is None else self.parts.tensors

    @at_run_time
    def follow_trainable(self) -> None:
        """Let the unsharded parameter need a gradient as the sharded one does now."""
        needs_grad = self.fsdp_param.sharded_param.requires_grad
        if hasattr(self, "unsharded_param") and self.unsharded_param.requires_grad != needs_grad:
            self.unsharded_param.requires_grad_(needs_grad)

    # All-gather

    def gather_input(self, is_post_forward: bool) -> torch.Tensor:
        """What this rank sends of a parameter that is not extended: 1-D, before it is moved and cast."""
        if is_post_forward:
            assert self.post_forward is not None
            return self.post_forward.data
        return self.fsdp_param._sharded_param_data  # (shard_numel,)

    @at_run_time
    def input(self) -> Input:
        """What is made of the shards of all ranks."""
        plan, dtype = self.plan, self.unsharded_param.dtype
        kind = "rows" if plan.shard_dim == 0 else "columns"
        return Input(plan.shard_numel, dtype, plan.is_cast, kind, plan.size, plan.shard_size, plan.shard_dim)

    @at_run_time
    def post_forward_input(self) -> Input:
        """What is made of the post-forward shards of all ranks of the smaller mesh."""
        assert self.post_forward is not None
        return Input(self.post_forward.data.numel(), self.unsharded_param.dtype, kind="flat", size=self.plan.size)

    def extended_inputs(self) -> list[torch.Tensor]:
        """What an extension sends: 1-D tensors on the group's device."""
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
        """What an extension makes of all ranks' inputs, each (ranks, numel of the input), to fill `filled` with."""
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
        """Free everything there may be, whatever the state says, and drop the gradient."""
        param = self.fsdp_param
        set_accumulated_gradient(param, None)
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
            unsharded.grad = None
        if not hasattr(self, "unsharded_param"):
            return  # never traced: torch's own reset has freed it
        if self.post_forward is not None:
            self.post_forward.free(param)
        for tensor in self.filled:
            free_storage(tensor.data)
        self.unsharded_param.grad = None
        self.register_sharded()

    # What the modules hold

    def register_sharded(self) -> None:
        """Register the sharded parameter."""
        self._register(self.fsdp_param.sharded_param)

    def register_unsharded(self) -> None:
        """Register what the graph computes with."""
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
        """Register what eager code finds after a graph that leaves the parameter unsharded."""
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
        """The unsharded gradient of this backward and of microbatches before it, plain; None if there is none.

        Args:
            dtype: To which this backward's is cast; None for its own.
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
        """Give a gradient that was not reduced to torch's unsharded parameter, if it is another than ours."""
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
