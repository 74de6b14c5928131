"""Shard of a parameter between forward and backward, with `reshard_after_forward=<int>`."""

from __future__ import annotations

import torch
from torch import nn

from compile_fsdp.ops import copy_
from compile_fsdp.runtime.gather import Input
from compile_fsdp.runtime.tracing import at_run_time, guarded_text
from compile_fsdp.torch_compat.dynamo import mark_static
from compile_fsdp.torch_compat.fsdp import FSDPParam, free_storage


class PostForwardShard:
    """A rank's shard of one parameter over the smaller mesh, between forward and backward."""

    def __init__(
        self, fsdp_param: FSDPParam, unsharded_param: torch.Tensor, shard_count: int, storage_bytes: int
    ) -> None:
        numel = storage_bytes // unsharded_param.itemsize
        self.padded_numel_text = guarded_text(numel)  # see [Note: Numbers that stay numbers]
        # (padded numel / ranks of the smaller mesh,); has memory, of these bytes, only between `fill` and `free`.
        self.data = torch.empty(numel // shard_count, dtype=unsharded_param.dtype, device=unsharded_param.device)
        self.bytes_text = guarded_text(self.data.untyped_storage().nbytes())
        size, stride = fsdp_param.sharded_post_forward_size, fsdp_param.contiguous_sharded_post_forward_stride
        # A DTensor on the memory of `data`, for the modules to hold.
        self.parameter = nn.Parameter(
            fsdp_param.to_sharded_post_forward_dtensor(self.data.as_strided(size, stride)),
            requires_grad=fsdp_param.sharded_param.requires_grad,
        )
        mark_static(self.data)
        free_storage(self.data)

    @at_run_time
    def input(self, size: tuple[int, ...]) -> Input:
        """Describe how the shards of the smaller mesh form the unsharded value of this size."""
        return Input(self.data.numel(), self.data.dtype, kind="flat", size=size)

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
