"""Traced counterpart of an FSDP2 parameter: its layout, and the tensors that graphs read.

[Note: One object for life]
The unsharded parameter is created once, with an empty storage. A traced step resizes that storage and copies the
gathered value into it, so that the parameter is never an alias of a gather buffer at a graph boundary. The pass
`remove_unshard_copies` removes both ops if the graph proves that no code outside of it can see their effect.

[Note: Leaves are plain]
The autograd leaf of a graph is always a plain tensor with its own storage, and no DTensor crosses a graph boundary. If
a parameter is a DTensor (tensor parallelism), `DTensor.from_local` builds it from the leaf inside the graph, and its
backward brings the gradient to the parameter's placements. Other tensor subclasses follow [Note: Parts of a subclass].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from compile_fsdp.ops import copy_
from compile_fsdp.runtime.checks import check_shard, check_unsharded
from compile_fsdp.runtime.dtensor_parameters import as_dtensor, wraps_as_dtensor
from compile_fsdp.runtime.gather import Input
from compile_fsdp.runtime.subclass_parameters import Extension, Parts, find_subclass, is_extended
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.autograd import count_uses
from compile_fsdp.torch_compat.distributed import local_tensor
from compile_fsdp.torch_compat.dynamo import mark_static
from compile_fsdp.torch_compat.fsdp import FSDPParam, ShardedState, data_parallel_dims, free_storage, unsharded_spec


class PostForwardShard:
    """A rank's shard of one parameter between forward and backward, with `reshard_after_forward=<int>`."""

    def __init__(
        self, fsdp_param: FSDPParam, unsharded_param: torch.Tensor, shard_count: int, storage_bytes: int
    ) -> None:
        numel = storage_bytes // unsharded_param.itemsize
        self.padded_numel_text = str(numel)  # see [Note: Numbers that stay numbers]
        # (padded numel / ranks of the smaller mesh,); has memory, of these bytes, only between `fill` and `free`.
        self.data = torch.empty(numel // shard_count, dtype=unsharded_param.dtype, device=unsharded_param.device)
        self.bytes_text = str(self.data.untyped_storage().nbytes())
        size, stride = fsdp_param.sharded_post_forward_size, fsdp_param.contiguous_sharded_post_forward_stride
        # A DTensor on the memory of `data`, for the modules to hold.
        self.parameter = nn.Parameter(
            fsdp_param.to_sharded_post_forward_dtensor(self.data.as_strided(size, stride)),
            requires_grad=fsdp_param.sharded_param.requires_grad,
        )
        mark_static(self.data)
        free_storage(self.data)
        self.layout = Input(self.data.numel(), self.data.dtype, kind="flat", size=tuple(fsdp_param._orig_size))

    def fill(self, fsdp_param: FSDPParam, unsharded_param: torch.Tensor, shard_count: int, rank: torch.Tensor) -> None:
        """Copy this rank's slice of the unsharded parameter into `data`."""
        if int(self.bytes_text) > 0:
            flat = unsharded_param.reshape(-1)
            missing = int(self.padded_numel_text) - flat.numel()
            if missing > 0:
                flat = torch.cat([flat, flat.new_zeros(missing)])
            self.data.untyped_storage().resize_(int(self.bytes_text))
            # The rank is a graph input and not a number, so that graphs are equal on all ranks.
            copy_(self.data, flat.view(shard_count, -1).index_select(0, rank).view(-1))
        fsdp_param._sharded_post_forward_param_data = self.data
        fsdp_param._sharded_post_forward_param = self.parameter

    def free(self, fsdp_param: FSDPParam) -> None:
        if int(self.bytes_text) > 0:
            self.data.untyped_storage().resize_(0)
        fsdp_param._sharded_post_forward_param_data = None
        fsdp_param._sharded_post_forward_param = None


class TraceableParam:
    """The traced counterpart of one FSDPParam.

    Its `unsharded_param`, which graphs read, is a plain tensor. See [Note: Leaves are plain].
    """

    def __init__(
        self, fsdp_param: FSDPParam, shard_count: int, post_forward_count: int | None, device: torch.device
    ) -> None:
        """Create the empty unsharded parameter; `post_forward_count` is None without a smaller mesh."""
        self.fsdp_param = fsdp_param
        self.extension = Extension(fsdp_param) if is_extended(fsdp_param) else None
        if not hasattr(fsdp_param, "_unsharded_param"):
            self._create_unsharded(shard_count, device)
        check_unsharded(fsdp_param)
        unsharded = fsdp_param._unsharded_param
        self.parts: Parts | None = None  # of an unsharded parameter that is a tensor subclass
        if find_subclass(fsdp_param) is not None:
            assert self.extension is not None
            self.parts = Parts(fsdp_param, self.extension)
            if fsdp_param.sharded_state is not ShardedState.UNSHARDED:
                for part in self.parts.tensors:
                    free_storage(part)
            empty = torch.empty(fsdp_param._orig_size, dtype=unsharded.dtype, device=unsharded.device)
            self.unsharded_param = nn.Parameter(empty)
            free_storage(self.unsharded_param.data)
        elif fsdp_param.is_dtensor:
            # detach() gives a separate leaf on the storage of the DTensor's local tensor.
            local = local_tensor(unsharded).detach()
            self.unsharded_param = nn.Parameter(local, requires_grad=fsdp_param.sharded_param.requires_grad)
        else:
            self.unsharded_param = unsharded
        shard_size, dim = fsdp_param.padded_sharded_param_size, fsdp_param.fsdp_placement.dim
        # The layout and the bytes are equal on every rank, because they include the padding.
        self.layout = Input(
            numel=shard_size.numel(),
            dtype=self.unsharded_param.dtype,
            is_cast=fsdp_param.param_dtype is not None,
            kind="rows" if dim == 0 else "columns",
            size=tuple(fsdp_param._orig_size),  # for a DTensor, of its local tensor
            shard_size=tuple(shard_size),
            dim=dim,
        )
        padded_bytes = shard_size.numel() * shard_count * self.unsharded_param.itemsize
        # Of each tensor that a gather fills: the parameter, or its parts.
        self.storage_bytes = [padded_bytes] if self.parts is None else self.parts.storage_bytes
        dims = data_parallel_dims(fsdp_param)
        # Builds the DTensor that modules hold, if its mesh includes the data-parallel dims.
        self.wrap = wraps_as_dtensor(unsharded_spec(fsdp_param), dims) if dims else None
        self.post_forward: PostForwardShard | None = None
        if post_forward_count is not None:
            full_bytes = self.storage_bytes[0]
            self.post_forward = PostForwardShard(fsdp_param, self.unsharded_param, post_forward_count, full_bytes)
        self.is_watched = False  # whether the hook on the unsharded parameter's gradient is registered
        self._own_uses = list(map(count_uses, self.filled))  # before eager code saves any

    @at_run_time
    def _create_unsharded(self, shard_count: int, device: torch.device) -> None:
        param = self.fsdp_param
        if self.extension is not None:
            inputs = param.all_gather_inputs
            numels, dtypes = [each.numel() for each in inputs], [each.dtype for each in inputs]
        else:
            numels, dtypes = [param._sharded_param_data.numel()], [param.param_dtype or param.orig_dtype]
        param.init_all_gather_outputs(numels, dtypes, shard_count, device)
        for output in param.all_gather_outputs if self.extension is not None else []:
            output.zero_()  # the extension computes with this output
        param.init_unsharded_param()
        param.free_unsharded_param()
        if find_subclass(param) is None:
            free_storage(local_tensor(param._unsharded_param))

    @at_run_time
    def refresh(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Prepare the tensors for a trace, and call `hook` with the parameter after its gradient is accumulated.

        Compiled autograd traces the hook there. A plain hook would get the gradient itself, but on 2.13 it breaks
        compiled autograd if there is no gradient.
        """
        param = self.fsdp_param
        if self.extension is not None:
            check_shard(param)
        # torch.compile(dynamic=True) would make shard sizes symbols, and unify them with an equal batch size.
        for shard in (param._sharded_param_data, param.sharded_param, local_tensor(param.sharded_param)):
            mark_static(shard)
        if self.unsharded_param.requires_grad and not self.is_watched:
            self.is_watched = True
            self.unsharded_param.register_post_accumulate_grad_hook(hook)

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameter."""
        needs_grad = self.fsdp_param.sharded_param.requires_grad
        for tensor in (self.unsharded_param, self.fsdp_param._unsharded_param):
            if tensor.requires_grad != needs_grad:
                tensor.requires_grad_(needs_grad)

    @at_run_time
    def is_saved(self) -> bool:
        """Whether eager code has saved the unsharded parameter, or a view of it, as for its backward; graphs do not."""
        return any(count_uses(each) > own for each, own in zip(self.filled, self._own_uses, strict=True))

    @property
    def has_own_slice(self) -> bool:
        """Whether the post-forward shard is that of a graph, and not that of eager code."""
        own = None if self.post_forward is None else self.post_forward.data
        return own is not None and self.fsdp_param._sharded_post_forward_param_data is own

    @property
    def filled(self) -> list[torch.Tensor]:
        """Tensors that a gather fills: the unsharded parameter, or its parts."""
        return [self.unsharded_param] if self.parts is None else self.parts.tensors

    def gather_input(self, is_post_forward: bool) -> torch.Tensor:
        """Return this rank's 1-D all-gather input without extension, before move and cast."""
        if is_post_forward:
            assert self.post_forward is not None
            return self.post_forward.data
        return self.fsdp_param._sharded_param_data  # (layout.numel,)

    def traced(self) -> torch.Tensor:
        """Return the tensor that a graph computes with, made from the unsharded parameter."""
        leaf: torch.Tensor = self.unsharded_param
        if self.parts is not None:
            leaf = self.parts.join(leaf, *self.parts.tensors)
        if not self.fsdp_param.is_dtensor:
            return leaf
        # See [Note: Leaves are plain].
        return as_dtensor(leaf, unsharded_spec(self.fsdp_param)) if self.wrap is None else self.wrap(leaf)
