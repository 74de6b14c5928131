"""Device meshes that the tests of a rank share.

What Dynamo has compiled keeps its process groups for good, and a thread of each wakes a hundred times a second. A mesh
of several dims has groups of its own, so the tests that want one of equal shape and names get the same.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_world: dist.ProcessGroup | None = None
_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
_groups = 0


def shared_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, made once for each default process group."""
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
    """How many process groups the shared meshes have made beside the default one."""
    return _groups if _world is dist.group.WORLD else 0
