"""Device meshes that the tests of a rank share.

Code compiled by Dynamo keeps its process groups forever, and each group has a thread that wakes a hundred times a
second. A mesh of several dims creates process groups, so tests that need equal shapes and names share one mesh.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_world: dist.ProcessGroup | None = None
_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
_groups = 0


def shared_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh over all ranks, created once per default process group."""
    global _world, _groups
    if _world is not dist.group.WORLD:
        _world, _groups = dist.group.WORLD, 0
        _meshes.clear()
    key = (device_type, shape, names)
    if key not in _meshes:
        before = dist.get_pg_count()
        _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
        _groups += dist.get_pg_count() - before
    return _meshes[key]


def group_count() -> int:
    """Number of process groups that the shared meshes have created."""
    return _groups if _world is dist.group.WORLD else 0
