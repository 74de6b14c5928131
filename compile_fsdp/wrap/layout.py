"""Sizes of sharded and unsharded parameters under `fully_shard`, equal on all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def shard_count(kwargs: Mapping[str, Any]) -> int:
    """The number of ranks that `fully_shard` shards over with these arguments."""
    mesh: DeviceMesh | None = kwargs.get("mesh")
    if mesh is None:  # a launcher sets WORLD_SIZE before there is a process group
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    dims = kwargs.get("dp_mesh_dims")
    if dims is not None:
        return math.prod(mesh[name].size() for name in dims.shard_names)
    return mesh.size(mesh.ndim - 1)  # with two dims, parameters are replicated over the first


def shard_of(parameter: nn.Parameter, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """The non-negative dim on which `fully_shard` shards a parameter, and the number of ranks it shards over."""
    place = kwargs.get("shard_placement_fn")
    placed = None if place is None else place(parameter)
    # `placed` is a Shard, or torch's ShardPlacementResult, which has a placement and a mesh.
    placement = getattr(placed, "placement", placed)
    mesh_info = getattr(placed, "mesh_info", None)
    dim = placement.dim if isinstance(placement, Shard) else 0
    return dim % parameter.ndim, shard_count(kwargs) if mesh_info is None else mesh_info.shard_mesh_size


def local_shape(parameter: nn.Parameter) -> list[int]:
    """The shape that `fully_shard` splits: the parameter's shape, or a DTensor's largest local shape."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // parameter.device_mesh.size(mesh_dim))
    return shape


def shard_bytes(parameter: nn.Parameter, kwargs: Mapping[str, Any]) -> int:
    """Bytes of a parameter's shard on each rank, in the parameter's dtype, including padding of an uneven split."""
    dim, ranks = shard_of(parameter, kwargs)
    shape = local_shape(parameter)
    shape[dim] = -(-shape[dim] // ranks)
    return math.prod(shape) * parameter.element_size()


def unsharded_bytes(parameter: nn.Parameter, kwargs: Mapping[str, Any]) -> int:
    """Bytes of an unsharded parameter, in the dtype of its all-gather."""
    policy = kwargs.get("mp_policy")
    dtype = None if policy is None or not parameter.is_floating_point() else policy.param_dtype
    return math.prod(local_shape(parameter)) * (dtype or parameter.dtype).itemsize
