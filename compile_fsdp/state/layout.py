"""Compute each rank's region of a tensor, and collect whole tensors on rank 0 or distribute them from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from compile_fsdp.state.ranks import broadcast
from compile_fsdp.torch_compat.distributed import local_tensor, shard_extent


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    """(ndim,) index of the first element; in a dim in which the region is empty, the size of the tensor."""
    sizes: tuple[int, ...]
    """(ndim,) size of the region in each dim."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a DTensor on `mesh`, or of a plain tensor if `mesh` is None."""

    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()  # one for each dim of `mesh`

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        if isinstance(tensor, DTensor):
            return cls(tensor.shape, tensor.dtype, tensor.device_mesh, tuple(tensor.placements))
        return cls(tensor.shape, tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def regions(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> dict[int, Region]:
    """The region of a tensor that each rank of a mesh holds, by global rank; equal for replicas."""
    coordinates = itertools.product(*map(range, mesh.shape))
    return {int(mesh.mesh[each]): _region_at(shape, mesh, each, placements) for each in coordinates}


def _region_at(
    shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int], placements: Sequence[Placement]
) -> Region:
    sizes, offsets = shard_extent(tuple(shape), mesh.shape, list(coordinate), placements)
    return Region(tuple(offsets), tuple(sizes))


def region_here(spec: TensorSpec) -> Region:
    """This rank's region of a DTensor; an empty region if the rank is not in the mesh."""
    assert spec.mesh is not None
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Region((0,) * len(spec.shape), (0,) * len(spec.shape))
    return _region_at(spec.shape, spec.mesh, coordinate, spec.placements)


def wrap_local(local: Tensor, spec: TensorSpec) -> DTensor:
    assert spec.mesh is not None
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)


def cut(whole: Tensor, spec: TensorSpec, device: torch.device) -> Tensor:
    """Copy this rank's region of a whole tensor under `spec` to `device`; never a view of `whole`."""
    if spec.mesh is None:
        return whole.detach().clone()
    part = whole.detach()[region_here(spec).slices]
    return wrap_local(part.to(device, copy=True).contiguous(), spec)


def empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """An uninitialised tensor with the layout of `spec`."""
    if spec.mesh is None:
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    return wrap_local(torch.empty(region_here(spec).sizes, dtype=spec.dtype, device=device), spec)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor, or a DTensor's local tensor, has torch's own class; torchao's quantized state has another."""
    return type(local_tensor(tensor)) in (Tensor, nn.Parameter)


def plain(tensor: Tensor) -> Tensor:
    """A tensor of another class, or a DTensor with a local tensor of one, as a new plain one; a plain tensor itself."""
    if is_plain(tensor):
        return tensor
    if isinstance(tensor, DTensor):
        return wrap_local(plain(local_tensor(tensor)), TensorSpec.of(tensor))
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@torch.no_grad()
def collect_whole(tensor: DTensor) -> Tensor:
    """Gather a DTensor into a new plain tensor on every rank. Collective over the tensor's mesh."""
    # Ranks may have local tensors of different classes: torchao quantizes only shards of suitable sizes.
    whole: Tensor = cast(DTensor, plain(tensor)).full_tensor()
    return whole.clone() if all(placement.is_replicate() for placement in tensor.placements) else whole


# [Note: Ranks may see different meshes]
# A slice of a mesh, such as its data-parallel dim beside tensor parallelism, differs between ranks. On a 2 x 2 mesh,
# ranks 0 and 2 see a slice with ranks (0, 2), and ranks 1 and 3 see a slice with ranks (1, 3). A tensor on such a slice
# is replicated over the remaining dims. A rank knows only its own slice, and that rank 0's slice contains rank 0.


@torch.no_grad()
def collect_on_first(tensor: DTensor, offload: bool) -> Tensor | None:
    """Gather a DTensor on global rank 0, on the CPU if `offload`; None on all other ranks. All ranks call it.

    Rank 0 receives each region from a rank that holds it, so the other ranks need no additional memory. Rank 0's mesh
    must contain rank 0, see [Note: Ranks may see different meshes].
    """
    if any(isinstance(each, Partial) for each in tensor.placements):
        summed = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
        tensor = tensor.redistribute(placements=summed)
    mesh = tensor.device_mesh
    owners: dict[Region, int] = {}
    for rank, region in sorted(regions(tensor.shape, mesh, tensor.placements).items()):
        if region.numel:
            owners.setdefault(region, rank)
    rank, local = dist.get_rank(), plain(local_tensor(tensor))
    if rank != 0:
        if rank in owners.values() and bool((mesh.mesh == 0).any()):
            dist.send(_as_bytes(local.to(mesh.device_type).contiguous()), dst=0)
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if offload else mesh.device_type)
    for region, owner in owners.items():
        part = whole[region.slices]
        if owner == 0:
            part.copy_(local)
            continue
        is_direct = part.is_contiguous() and part.device.type == mesh.device_type
        buffer = part if is_direct else torch.empty(part.shape, dtype=part.dtype, device=mesh.device_type)
        dist.recv(_as_bytes(buffer), src=owner)
        if not is_direct:
            part.copy_(buffer)
    return whole


# Bytes that rank 0 broadcasts at once of a whole tensor, of which each rank keeps its region: large enough to make
# latency negligible, and small compared with the shards of a model that needs sharding.
CHUNK_BYTES = 16 * 2**20


@torch.no_grad()
def distribute_from_first(whole: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    """Distribute a whole tensor from global rank 0, each rank's region to `device`. Collective: all ranks call it."""
    if spec.mesh is None:
        copied = broadcast(whole.cpu() if whole is not None else None)
        assert copied is not None
        return copied if whole is None else whole.clone()
    region, wire = region_here(spec), spec.mesh.device_type
    local = torch.empty(region.sizes, dtype=spec.dtype, device=device)
    rows, *row_shape = spec.shape or (1,)  # a tensor without dims is a row
    row_bytes = math.prod(row_shape) * spec.dtype.itemsize
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    first, count = (region.offsets or (0,))[0], (region.sizes or (1,))[0]
    for start in range(0, rows if row_bytes else 0, step):
        stop = min(start + step, rows)
        if whole is not None:
            chunk = whole.reshape(rows, *row_shape)[start:stop].to(wire).contiguous()
        else:
            chunk = torch.empty((stop - start, *row_shape), dtype=spec.dtype, device=wire)
        dist.broadcast(_as_bytes(chunk), src=0)
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            part = chunk[(slice(low - start, high - start), *region.slices[1:])]
            local.view(count, *region.sizes[1:])[low - first : high - first] = part
    return wrap_local(local, spec)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because process groups do not support every dtype."""
    return tensor.view(-1).view(torch.uint8)
