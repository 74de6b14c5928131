"""The reduction of one parameter group's gradients as ops of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compile_fsdp.compat import (
    DDPMeshInfo,
    FSDPMeshInfo,
    FSDPParamGroup,
    chunk_cat,
    functional_collectives,
    gradient_divide_factors,
)
from compile_fsdp.ops import reduce_scatter_tensor
from compile_fsdp.runtime.group_calls import group_call


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are averaged over the ranks, without overflow in the reduce dtype.

    Attributes:
        shard_count: Ranks of the reduce-scatter; 1 for none.
        scatter_group: Its process group's name.
        scatter_op: Its operation, "avg" or "sum".
        replica_group: Name of the process group of the all-reduce (HSDP, replicate); empty for none.
        replica_op: Its operation.
        pre_factor: Multiplied before the reduce-scatter, where eager FSDP2 lets the collective do it.
        pre_divisor: Divided by before the reduce-scatter.
        lone_divisor: Divided by in place of a reduce-scatter.
        post_divisor: Divided by after everything.
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


def plan_reduction(group: FSDPParamGroup, dtype: torch.dtype) -> Reduction:
    """The reduction of gradients of that dtype that eager FSDP2 chooses for the group's present settings."""
    scatter = group._reduce_scatter_process_group if isinstance(group.mesh_info, FSDPMeshInfo) else None
    replica = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
    shard_count = 1 if scatter is None else scatter.size()
    factor = group.gradient_divide_factor
    scatter_name = "" if scatter is None else scatter.group_name
    replica_name = "" if replica is None else replica.group_name
    lone_divisor = factor if shard_count == 1 else None
    is_safe = dtype in (torch.float32, torch.bfloat16) and not group.force_sum_reduction_for_comms
    if is_safe and factor is not None and factor != shard_count:
        # Eager FSDP2 asks the collective itself to multiply, which NCCL alone can do.
        pre_factor = 1 / factor if shard_count > 1 else None
        return Reduction(shard_count, scatter_name, replica_name, lone_divisor, pre_factor=pre_factor)
    pre, post, scatter_op, replica_op = gradient_divide_factors(
        scatter, replica, dtype, group.device.type, factor, group.force_sum_reduction_for_comms
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


def _op_name(op: object) -> str:
    return "avg" if op == dist.ReduceOp.AVG else "sum"


def reduce_scatter(
    grads: list[torch.Tensor],
    reduction: Reduction,
    name: str,
    custom: Callable[[torch.Tensor, str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """This rank's padded shards of all gradients, flat, one behind the other.

    Args:
        grads: Unsharded gradients of one dtype; a rank's shard is a block of rows of each.
        reduction: Which group, and how to average.
        name: Of the range in a profile.
        custom: The user's own communicator, with the operation's name.
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
    """The average over the replicas."""
    launched = functional_collectives.all_reduce(flat, reduction.replica_op, reduction.replica_group)
    waited: torch.Tensor = functional_collectives.wait_tensor(launched)
    return waited


@group_call
def part(reduced: torch.Tensor, numels: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The parameters' shards of the flat reduced gradient, as values of their own.

    A graph that returned the flat one could not reduce one gradient apart from the others.
    """
    if len(numels) == 1:
        return (reduced,)
    shards = reduced.split(list(numels))
    return tuple([shards[i].clone() for i in range(len(numels))])
