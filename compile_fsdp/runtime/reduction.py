"""Reduction of one parameter group's gradients as graph ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compile_fsdp.ops import reduce_scatter_tensor
from compile_fsdp.runtime import communicators
from compile_fsdp.runtime.group_calls import group_call
from compile_fsdp.runtime.group_names import name_in_graphs
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.dispatch import chunk_cat
from compile_fsdp.torch_compat.distributed import functional_collectives
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

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


@dataclass(frozen=True, slots=True)
class Reduction:
    """Averaging of gradients over the ranks, without overflow in the reduce dtype.

    Each factor or divisor is None if nothing is multiplied or divided there.

    Attributes:
        shard_count: Number of ranks of the reduce-scatter; 1 if there is no reduce-scatter.
        scatter_group: Name of the reduce-scatter's process group.
        scatter_op: Operation of the reduce-scatter, "avg" or "sum".
        replica_group: Name of the all-reduce's process group (HSDP, replicate); empty if there is no all-reduce.
        replica_op: Operation of the all-reduce, "avg" or "sum".
        pre_factor: Factor before the reduce-scatter, which eager FSDP2 leaves to the collective.
        pre_divisor: Divisor before the reduce-scatter.
        lone_divisor: Divisor in place of a reduce-scatter.
        post_divisor: Divisor after all collectives.
    """

    shard_count: int
    scatter_group: str
    replica_group: str
    lone_divisor: float | None
    scatter_op: str = "sum"
    replica_op: str = "sum"
    pre_factor: float | None = None
    pre_divisor: float | None = None
    post_divisor: float | None = None


@at_run_time
def process_groups(fsdp_group: FSDPParamGroup) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the process groups of the reduce-scatter and of the all-reduce, None if it does not run."""
    scatter = fsdp_group._reduce_scatter_process_group if isinstance(fsdp_group.mesh_info, FSDPMeshInfo) else None
    replica = fsdp_group._all_reduce_process_group if isinstance(fsdp_group.mesh_info, DDPMeshInfo) else None
    return scatter, replica


@at_run_time
def plan_reduction(fsdp_group: FSDPParamGroup, dtype: torch.dtype) -> Reduction:
    """Plan the reduction that eager FSDP2 chooses for `dtype` and the group's present settings."""
    scatter, replica = process_groups(fsdp_group)
    shard_count = 1 if scatter is None else scatter.size()
    factor = fsdp_group.gradient_divide_factor
    scatter_name = "" if scatter is None else name_in_graphs(scatter)
    replica_name = "" if replica is None else name_in_graphs(replica)
    lone_divisor = factor if shard_count == 1 else None
    is_safe = dtype in (torch.float32, torch.bfloat16) and not fsdp_group.force_sum_reduction_for_comms
    if is_safe and factor is not None and factor != shard_count:
        # Eager FSDP2 lets the collective multiply, which only NCCL supports.
        pre_factor = 1 / factor if shard_count > 1 else None
        return Reduction(shard_count, scatter_name, replica_name, lone_divisor, pre_factor=pre_factor)
    pre, post, scatter_op, replica_op = gradient_divide_factors(
        scatter, replica, dtype, fsdp_group.device.type, factor, fsdp_group.force_sum_reduction_for_comms
    )
    return Reduction(
        shard_count,
        scatter_name,
        replica_name,
        lone_divisor,
        scatter_op=_op_name(scatter_op),
        replica_op=_op_name(replica_op),
        pre_divisor=None if pre == 1 else pre,
        post_divisor=None if post == 1 else post,
    )


@at_run_time
def _op_name(op: object) -> str:
    return "avg" if op == dist.ReduceOp.AVG else "sum"


def reduce_gradients(
    group: TraceableGroup, arrived: list[int], grads: list[torch.Tensor]
) -> tuple[torch.Tensor, ...] | None:
    """Reduce unsharded gradients according to the group's settings.

    Args:
        group: The group that the gradients belong to.
        arrived: Positions of the parameters that have a gradient.
        grads: Unsharded gradients, in the order of `arrived`.
    Returns:
        For each gradient, this rank's padded shard, flat, in the dtype of the parameter's gradient. None if a later
        backward does the all-reduce over the replicas.
    """
    fsdp_group = group.fsdp_group
    dims, numels = _shard_layout(group, group.constants.text)
    ranks = group.constants.shard_count
    rows = [_rows_first(grad, dims[i], ranks) for i, grad in zip(arrived, grads, strict=True)]
    wanted, dtypes = _dtypes(group, fsdp_group._reduce_dtype, arrived, [each.dtype for each in grads])
    if wanted is not None:
        rows = [each.to(wanted) for each in rows]
    # The settings are arguments so that Dynamo guards them, and traces again when a setting changes.
    own_group = getattr(fsdp_group.mesh_info, "reduce_scatter_process_group", None)
    settings = fsdp_group.gradient_divide_factor, fsdp_group.force_sum_reduction_for_comms, own_group
    reduction = _plan(group, rows[0].dtype, *settings)
    plain = isinstance(fsdp_group._reduce_scatter_comm, PLAIN_REDUCE_SCATTERS)
    custom = None if plain else partial(communicators.reduce, fsdp_group)
    flat = reduce_scatter(rows, reduction, group.constants.reduce_name, custom)
    sizes = [numels[i] for i in arrived]
    if reduction.replica_group:
        partial_output = fsdp_group._partial_reduce_output
        if partial_output is not None:
            flat = flat + partial_output
        if not fsdp_group.all_reduce_grads:
            fsdp_group._partial_reduce_output = flat
            return None
        fsdp_group._partial_reduce_output = None
        flat = all_reduce(flat, reduction)
    if fsdp_group._all_reduce_hook is not None:
        fsdp_group._all_reduce_hook(flat)
    if reduction.post_divisor is not None:
        flat = flat / reduction.post_divisor
    if len(dtypes) == 1 and dtypes[0] is not None:
        flat = flat.to(dtypes[0])
    if group.params[0].fsdp_param.offload_to_cpu:
        flat = flat.to("cpu")
    shards = split_shards(flat, sizes)
    if len(dtypes) == 1:
        return shards
    return tuple([shard.to(dtype or shard.dtype) for shard, dtype in zip(shards, dtypes, strict=True)])


def _rows_first(grad: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    # If the shard dim is not 0, rearrange the gradient so that each rank's shard is a block of rows.
    return grad if dim == 0 or ranks == 1 else torch.cat(grad.chunk(ranks, dim=dim))


@eval_at_trace_time_guarded
def _shard_layout(group: TraceableGroup, text: str) -> tuple[list[int], list[int]]:
    # `text` is an argument so that Dynamo guards it. See [Note: Numbers that stay numbers].
    plans = [param.plan for param in group.params]
    return [plan.shard_dim for plan in plans], [plan.shard_numel for plan in plans]


@eval_at_trace_time_guarded
def accumulation_dtypes(group: TraceableGroup, text: str) -> list[torch.dtype | None]:
    """Return the dtype to which each parameter's unsharded gradient is cast before it is accumulated.

    None if the gradient keeps its dtype.
    """
    # `text` is an argument so that Dynamo guards it. See [Note: Numbers that stay numbers].
    return [accumulation_dtype(param.fsdp_param) for param in group.params]


@eval_at_trace_time_guarded
def _dtypes(
    group: TraceableGroup, policy: torch.dtype | None, arrived: list[int], computed: list[torch.dtype]
) -> tuple[torch.dtype | None, list[torch.dtype | None]]:
    """Return the reduce dtype, None to keep the gradients' dtype, and the final dtype of each gradient.

    The list has a single dtype if all final dtypes are equal.
    """
    # `policy` is an argument so that Dynamo guards it.
    params = [group.params[index].fsdp_param for index in arrived]
    dtypes = [gradient_dtype(param) for param in params]
    return reduce_dtype(group.fsdp_group, params, computed), dtypes[:1] if len(set(dtypes)) == 1 else dtypes


@eval_at_trace_time_guarded
def _plan(group: TraceableGroup, dtype: torch.dtype, *settings: object) -> Reduction:
    return plan_reduction(group.fsdp_group, dtype)


def reduce_scatter(
    grads: list[torch.Tensor],
    reduction: Reduction,
    name: str,
    custom: Callable[[torch.Tensor, str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Reduce-scatter gradients into this rank's padded shards, concatenated into a 1-D tensor.

    Args:
        grads: Unsharded gradients of one dtype, in which a rank's shard is a block of rows.
        reduction: Process group and averaging.
        name: Name of the range in a profile.
        custom: The user's communicator, called with the flat gradients and "avg" or "sum"; None for the plain op.
    """
    flat: torch.Tensor = chunk_cat(grads, 0, reduction.shard_count).view(-1)
    if reduction.pre_factor is not None:
        flat = flat * reduction.pre_factor
    if reduction.pre_divisor is not None:
        flat = flat / reduction.pre_divisor
    if custom is not None and reduction.shard_count > 1:
        flat = custom(flat, reduction.scatter_op)
    elif reduction.shard_count > 1:
        launched = reduce_scatter_tensor(
            flat, reduction.scatter_op, reduction.shard_count, reduction.scatter_group, name
        )
        flat = functional_collectives.wait_tensor(launched)
    elif reduction.lone_divisor is not None:
        flat = flat / reduction.lone_divisor
    return flat


def all_reduce(flat: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """All-reduce flat gradients over the replicas."""
    launched = functional_collectives.all_reduce(flat, reduction.replica_op, reduction.replica_group)
    waited: torch.Tensor = functional_collectives.wait_tensor(launched)
    return waited


@group_call
def split_shards(reduced: torch.Tensor, numels: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Split the flat reduced gradient into separate tensors, one for each parameter.

    If a graph returned the flat gradient, it could not reduce each gradient separately.
    """
    if len(numels) == 1:
        return (reduced,)
    shards = reduced.split(list(numels))
    return tuple([shards[i].clone() for i in range(len(numels))])
