"""torch.distributed: process groups, their stores, the collectives as ops of a graph, DTensors, the flight recorder."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
import torch._C._distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _dtensor_spec

from compile_fsdp.torch_compat.declarations import needs, needs_attributes

# The key-value stores that process groups meet at. (2.13.0)
Store = torch._C._distributed_c10d.Store

# The collectives as ops of a graph. (2.13.0)
functional_collectives = torch.ops._c10d_functional

# How a DTensor is sharded. (2.13.0)
DTensorSpec = _dtensor_spec.DTensorSpec

# What carries a process group's collectives on a kind of device. (2.13.0)
needs_attributes(torch.distributed.ProcessGroup, "_get_backend")


@needs("torch.testing._internal.distributed.fake_pg.FakeStore")
def init_fake_process_group(world_size: int) -> None:
    """Make this process rank 0 of a world whose collectives do nothing. (2.13.0)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@needs("torch.distributed.distributed_c10d._resolve_process_group")
def resolve_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group that ops of a graph call by this name. (2.13.0)"""
    group: torch.distributed.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


@needs(
    "torch._C._distributed_c10d._register_process_group",
    "torch._C._distributed_c10d._unregister_process_group",
)
def add_group_name(group: torch.distributed.ProcessGroup, name: str) -> bool:
    """Let ops of a graph call a process group by one more name; False if the name is another living group's.

    Names are kept without the groups: one that is gone leaves its name to the next. (2.11.0, 2.13.0)
    """
    try:
        return resolve_group(name) == group
    except RuntimeError:
        torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]
        torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
        return True


@needs("torch.distributed.distributed_c10d._world.pg_map")
def group_store(group: torch.distributed.ProcessGroup) -> Store:
    """The key-value store that the ranks of a process group have met at. (2.13.0)"""
    return distributed_c10d._world.pg_map[group][1]


def backend_name(group: torch.distributed.ProcessGroup, device_type: str) -> str | None:
    """What carries a process group's collectives on that kind of device: "gloo", "nccl", "fake"; None for no backend.

    (2.13.0)
    """
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


@needs("torch._C._distributed_c10d._register_work")
def register_work(tensor: torch.Tensor, work: torch.distributed.Work) -> None:
    """Let `wait_tensor` of the tensor wait for the work. (2.13.0)"""
    torch._C._distributed_c10d._register_work(tensor, work)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor keeps on this rank, itself and not a view; any other tensor as it is. (2.13.0)"""
    return getattr(tensor, "_local_tensor", tensor)


@needs("torch.distributed.tensor._utils._compute_local_shape_and_global_offset")
def shard_extent(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of what the rank at `coordinate` of a mesh holds of a DTensor. (2.13.0)

    An empty shard has the dim's size as its offset.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh_shape), list(coordinate), placements)


@needs("torch._C._distributed_c10d._dump_fr_trace")
def executed_collectives() -> int:
    """How many collectives this process has executed, by torch's flight recorder. (2.13.0)

    The recorder keeps the last entries, as many as TORCH_FR_BUFFER_SIZE said in the environment before process groups
    were created, and with each the code that issued it, what that was compiled to, and its process group with threads.
    """
    dump: Callable[[], bytes] = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    entries = pickle.loads(dump()).get("entries", [])  # pickled by this process itself
    return 1 + max((int(entry["record_id"]) for entry in entries), default=-1)


def split_backward_code() -> CodeType | None:
    """Of the function that computes a pipeline stage's gradients of inputs, and those of parameters later. (2.13.0)

    None where nobody has imported it.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining._backward")
    return None if pipelining is None else pipelining.stage_backward_input.__code__


def stage_forward_code() -> CodeType | None:
    """Code of the function that calls a pipeline stage's module; None if nobody has imported it. (2.13.0)"""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    return None if pipelining is None else pipelining.PipelineStage.forward_one_chunk.__code__
