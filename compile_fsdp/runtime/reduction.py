"""Reduction of one parameter group's gradients as graph ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compile_fsdp.ops import reduce_scatter_tensor, split_with_sizes_copy
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded, group_call
from compile_fsdp.torch_compat.dispatch import chunk_cat
from compile_fsdp.torch_compat.distributed import functional_collectives, name_in_graphs
from compile_fsdp.torch_compat.fsdp import (
    PLAIN_REDUCE_SCATTERS,
    DDPMeshInfo,
    FSDPMeshInfo,
    FSDPParamGroup,
    accumulation_dtype,
    gradient_divide_factors,
    gradient_dtype,
    reduce_dtype,
)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduction of some gradients of a group: an average over the ranks, without overflow in the reduce dtype.

    Each factor or divisor is None if nothing is multiplied or divided there. Ops are "avg" or "sum".
    """

    name: str  # of the reduce-scatter in a profile, equal to eager FSDP2's name
    dims: list[int]  # sharded dim of each parameter
    numels: list[int]  # number of elements of each padded shard
    dtype: torch.dtype | None  # of the reduction; None for the gradients' own dtype
    final_dtypes: list[torch.dtype | None]  # of each reduced gradient, or one for all; None for the reduction's dtype
    shard_count: int  # number of ranks of the reduce-scatter; 1 if there is no reduce-scatter
    scatter_group: str  # name of the reduce-scatter's process group; empty without one
    scatter_op: str
    replica_group: str  # name of the all-reduce's process group (HSDP, replicate); empty if there is no all-reduce
    replica_op: str
    pre_factor: float | None  # factor before the reduce-scatter, which eager FSDP2 leaves to the collective
    pre_divisor: float | None  # divisor before the reduce-scatter
    lone_divisor: float | None  # divisor in place of a reduce-scatter
    post_divisor: float | None  # divisor after all collectives


@at_run_time
def process_groups(fsdp_group: FSDPParamGroup) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the process groups of the reduce-scatter and of the all-reduce, None if it does not run."""
    scatter = fsdp_group._reduce_scatter_process_group if isinstance(fsdp_group.mesh_info, FSDPMeshInfo) else None
    replica = fsdp_group._all_reduce_process_group if isinstance(fsdp_group.mesh_info, DDPMeshInfo) else None
    return scatter, replica


@eval_at_trace_time_guarded
def _plan(
    group: TraceableGroup, text: str, arrived: list[int], computed: list[torch.dtype], *settings: object
) -> Reduction:
    """Plan the reduction that eager FSDP2 chooses for gradients of these dtypes and the group's present settings."""
    # `text` and `settings` are arguments so that Dynamo guards them. See [Note: Numbers that stay numbers].
    fsdp_group, params = group.fsdp_group, [group.params[index] for index in arrived]
    fsdp_params = [param.fsdp_param for param in params]
    wanted = reduce_dtype(fsdp_group, fsdp_params, computed)
    final_dtypes = [gradient_dtype(param) for param in fsdp_params]
    scatter, replica = process_groups(fsdp_group)
    shard_count = 1 if scatter is None else scatter.size()
    factor, dtype = fsdp_group.gradient_divide_factor, wanted or computed[0]
    is_safe = dtype in (torch.float32, torch.bfloat16) and not fsdp_group.force_sum_reduction_for_comms
    pre_factor: float | None = None
    pre: float | None = None
    post: float | None = None
    scatter_op: object = dist.ReduceOp.SUM
    replica_op: object = dist.ReduceOp.SUM
    if is_safe and factor is not None and factor != shard_count:
        # Eager FSDP2 lets the collective multiply, which only NCCL supports.
        pre_factor = 1 / factor if shard_count > 1 else None
    else:
        pre, post, scatter_op, replica_op = gradient_divide_factors(
            scatter, replica, dtype, fsdp_group.device.type, factor, fsdp_group.force_sum_reduction_for_comms
        )
    return Reduction(
        name=fsdp_group._with_fqn("FSDP::post_backward_reduce"),
        dims=[param.layout.dim for param in params],
        numels=[param.layout.numel for param in params],
        dtype=wanted,
        final_dtypes=final_dtypes[:1] if len(set(final_dtypes)) == 1 else final_dtypes,
        shard_count=shard_count,
        scatter_group="" if scatter is None else name_in_graphs(scatter),
        scatter_op="avg" if scatter_op == dist.ReduceOp.AVG else "sum",
        replica_group="" if replica is None else name_in_graphs(replica),
        replica_op="avg" if replica_op == dist.ReduceOp.AVG else "sum",
        pre_factor=pre_factor,
        pre_divisor=None if pre == 1 else pre,
        lone_divisor=factor if shard_count == 1 else None,
        post_divisor=None if post == 1 else post,
    )


@eval_at_trace_time_guarded
def accumulation_dtypes(group: TraceableGroup, text: str) -> list[torch.dtype | None]:
    """Return the dtype to which each parameter's unsharded gradient is cast before it is accumulated, or None."""
    # `text` is an argument so that Dynamo guards it. See [Note: Numbers that stay numbers].
    return [accumulation_dtype(param.fsdp_param) for param in group.params]


def reduce_gradients(
    group: TraceableGroup, arrived: list[int], grads: list[torch.Tensor]
) -> tuple[torch.Tensor, ...] | None:
    """Reduce the unsharded gradients of the parameters at the positions `arrived`.

    Returns:
        For each gradient, this rank's padded shard, flat, in the dtype of the parameter's gradient. None if a later
        backward does the all-reduce over the replicas.
    """
    fsdp_group = group.fsdp_group
    own_group = getattr(fsdp_group.mesh_info, "reduce_scatter_process_group", None)
    settings = fsdp_group._reduce_dtype, group.backward.divisor_text, fsdp_group.force_sum_reduction_for_comms
    plan = _plan(group, group.constants.text, arrived, [each.dtype for each in grads], *settings, own_group)
    # If the shard dim is not 0, rearrange the gradient so that each rank's shard is a block of rows.
    rows = [
        grad if dim == 0 or plan.shard_count == 1 else torch.cat(grad.chunk(plan.shard_count, dim=dim))
        for dim, grad in zip(plan.dims, grads, strict=True)
    ]
    if plan.dtype is not None:
        rows = [each.to(plan.dtype) for each in rows]
    flat = _reduce_scatter(group, rows, plan)
    if plan.replica_group:
        partial_output = fsdp_group._partial_reduce_output
        if partial_output is not None:
            flat = flat + partial_output
        if not fsdp_group.all_reduce_grads:
            fsdp_group._partial_reduce_output = flat
            return None
        fsdp_group._partial_reduce_output = None
        launched = functional_collectives.all_reduce(flat, plan.replica_op, plan.replica_group)
        flat = functional_collectives.wait_tensor(launched)
    if fsdp_group._all_reduce_hook is not None:
        fsdp_group._all_reduce_hook(flat)
    if plan.post_divisor is not None:
        flat = flat / plan.post_divisor
    dtypes = plan.final_dtypes
    if len(dtypes) == 1 and dtypes[0] is not None:
        flat = flat.to(dtypes[0])
    if group.params[0].fsdp_param.offload_to_cpu:
        flat = flat.to("cpu")
    shards = split_shards(flat, plan.numels)
    if len(dtypes) == 1:
        return shards
    return tuple([shard.to(dtype or shard.dtype) for shard, dtype in zip(shards, dtypes, strict=True)])


def _reduce_scatter(group: TraceableGroup, rows: list[torch.Tensor], plan: Reduction) -> torch.Tensor:
    """Reduce-scatter gradients of one dtype into this rank's padded shards, concatenated into a 1-D tensor."""
    flat: torch.Tensor = chunk_cat(rows, 0, plan.shard_count).view(-1)
    if plan.pre_factor is not None:
        flat = flat * plan.pre_factor
    if plan.pre_divisor is not None:
        flat = flat / plan.pre_divisor
    if plan.shard_count == 1:
        return flat if plan.lone_divisor is None else flat / plan.lone_divisor
    comm = group.fsdp_group._reduce_scatter_comm
    if not isinstance(comm, PLAIN_REDUCE_SCATTERS):
        # Dynamo turns the collectives that a custom communicator calls into graph ops.
        process_group = group.fsdp_group._reduce_scatter_process_group
        output = comm.allocate((flat.numel() // process_group.size(),), dtype=flat.dtype, device=flat.device)
        op = dist.ReduceOp.AVG if plan.scatter_op == "avg" else dist.ReduceOp.SUM
        comm(output_tensor=output, input_tensor=flat, group=process_group, op=op, async_op=False)
        return output
    launched = reduce_scatter_tensor(flat, plan.scatter_op, plan.shard_count, plan.scatter_group, plan.name)
    waited: torch.Tensor = functional_collectives.wait_tensor(launched)
    return waited


@group_call
def split_shards(reduced: torch.Tensor, numels: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Split the flat gradient, because a graph that returned it could not reduce each parameter's gradient alone."""
    if len(numels) == 1:
        return (reduced,)
    shards = split_with_sizes_copy(reduced, list(numels), 0)
    return tuple([shards[i] for i in range(len(numels))])
