"""Custom communicators of a user in a graph.

Dynamo turns the torch.distributed collectives that they call into graph ops.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from compile_fsdp.torch_compat.fsdp import FSDPParamGroup


def gather(group: FSDPParamGroup, own: torch.Tensor) -> torch.Tensor:
    """All-gather the ranks' flat tensors into one flat tensor with the group's communicator."""
    comm, process_group = group._all_gather_comm, group._all_gather_process_group
    output = comm.allocate((own.numel() * process_group.size(),), dtype=own.dtype, device=own.device)
    comm(output_tensor=output, input_tensor=own, group=process_group, async_op=False)
    return output


def reduce(group: FSDPParamGroup, flat: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce-scatter the ranks' flat tensors; `op` is "avg" or "sum"."""
    comm, process_group = group._reduce_scatter_comm, group._reduce_scatter_process_group
    output = comm.allocate((flat.numel() // process_group.size(),), dtype=flat.dtype, device=flat.device)
    reduce_op = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    comm(output_tensor=output, input_tensor=flat, group=process_group, op=reduce_op, async_op=False)
    return output
