"""torch.distributed: process groups and stores, functional collectives, DTensors, pipelining, the flight recorder."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
import torch._C._distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _dtensor_spec, _utils

from compile_fsdp.torch_compat.declarations import Late, needs, needs_attributes
from compile_fsdp.torch_compat.dynamo import skip_code

# The collectives as ops of a graph. (2.13.0)
functional_collectives = torch.ops._c10d_functional

# The process group that ops of a graph refer to by this name. (2.13.0)
resolve_group: Callable[[Any], torch.distributed.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]

# Make `wait_tensor` of the tensor wait for the work. (2.13.0)
register_work: Callable[[torch.Tensor, torch.distributed.Work], object] = torch._C._distributed_c10d._register_work

# How a DTensor is sharded. (2.13.0)
DTensorSpec = _dtensor_spec.DTensorSpec

# Nested dicts and lists from values by flat name and the path of each name in a checkpoint. (2.13.0)
unflatten_state_dict: Callable[[Mapping[str, Any], Any], dict[str, Any]] = Late(
    "torch.distributed.checkpoint._nested_dict.unflatten_state_dict"
)

# Sizes and global offsets of a DTensor's shard, by the shapes of tensor and mesh (tuples), the coordinate in the mesh
# (a list) and the placements. An empty shard has the dim's size as its offset. (2.13.0)
shard_extent = _utils._compute_local_shape_and_global_offset

_FakeStore = Late("torch.testing._internal.distributed.fake_pg.FakeStore")

# The backend that runs a process group's collectives on a device type. (2.13.0)
needs_attributes(torch.distributed.ProcessGroup, "_get_backend")


def init_fake_process_group(world_size: int, rank: int = 0) -> None:
    """Make this process a rank of a world whose collectives do nothing. (2.11.0, 2.13.0)"""
    # torch's own list of devices for this backend lacks accelerators that an extension adds.
    accelerator = torch.accelerator.current_accelerator()
    devices = dict.fromkeys(["cpu", "cuda", *([accelerator.type] if accelerator else [])])
    backends = ",".join(f"{device}:fake" for device in devices)
    torch.distributed.init_process_group(backends, store=_FakeStore(), rank=rank, world_size=world_size)


def name_in_graphs(group: torch.distributed.ProcessGroup) -> str:
    """A process group's name in graphs, numbered in the order of first use in this process.

    torch's name is the number of groups created before. In a graph, this number would be part of the cache keys, and
    ranks with different numbers of earlier groups would compile different graphs.
    """
    names = (f"compile_fsdp:{number}" for number in itertools.count())
    return next(name for name in names if _add_group_name(group, name))


skip_code(name_in_graphs.__code__)


@needs("torch._C._distributed_c10d._register_process_group", "torch._C._distributed_c10d._unregister_process_group")
def _add_group_name(group: torch.distributed.ProcessGroup, name: str) -> bool:
    """Add a name by which ops of a graph refer to a process group; False if another live group has it. (2.11.0, 2.13.0)

    torch's registry does not keep groups alive, so the name of a destroyed group can be registered again.
    """
    try:
        return resolve_group(name) == group
    except RuntimeError:
        torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]
        torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
        return True


@needs("torch.distributed.distributed_c10d._world.pg_map")
def group_store(group: torch.distributed.ProcessGroup) -> torch._C._distributed_c10d.Store:
    """The key-value store through which the ranks of a process group rendezvous. (2.13.0)"""
    return distributed_c10d._world.pg_map[group][1]


def backend_name(group: torch.distributed.ProcessGroup, device_type: str) -> str | None:
    """A process group's backend for a device type, such as "gloo", "nccl" or "fake"; None if it has none. (2.13.0)"""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor itself, not a view of it; a plain tensor itself. (2.13.0)"""
    return getattr(tensor, "_local_tensor", tensor)


@needs("torch._C._distributed_c10d._dump_fr_trace")
def executed_collectives() -> int:
    """The number of collectives this process has executed, by torch's flight recorder. (2.13.0)

    The recorder keeps the last TORCH_FR_BUFFER_SIZE entries; torch reads that variable when it creates process groups.
    Each entry keeps alive the code that issued the collective, its compiled form, and its process group with threads.
    """
    dump: Callable[[], bytes] = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    entries = pickle.loads(dump()).get("entries", [])  # pickled by this process itself
    return 1 + max((int(entry["record_id"]) for entry in entries), default=-1)


def split_backward_code() -> CodeType | None:
    """Code of the function that computes a pipeline stage's input gradients before its parameter gradients. (2.13.0)

    None if nobody has imported the function.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining._backward")
    return None if pipelining is None else pipelining.stage_backward_input.__code__


def stage_forward_code() -> CodeType | None:
    """Code of the function that calls a pipeline stage's module; None if nobody has imported the function. (2.13.0)"""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    return None if pipelining is None else pipelining.PipelineStage.forward_one_chunk.__code__
