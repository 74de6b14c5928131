"""`param_info`: describe how `fully_shard` has sharded each parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from compile_fsdp.state.layout import Region, regions
from compile_fsdp.state.names import named_parameters


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter that `fully_shard` manages: its shape and dtype before sharding, and its shards."""

    group: tuple[str, ...]
    """FQNs of the modules of the parameter's group: one, unless `fully_shard` got a list. "" is the root."""
    shape: torch.Size
    """Shape before sharding; with tensor parallelism, the shape of the whole DTensor."""
    dtype: torch.dtype
    """The original dtype, not `param_dtype` of mixed precision."""
    mesh: DeviceMesh
    """The mesh of the sharded parameter, with the dims of tensor parallelism."""
    placements: tuple[Placement, ...]
    """Placements of the sharded parameter, one for each dim of `mesh`."""
    aliases: tuple[str, ...]
    """Other FQNs of the parameter, where modules share it."""

    @property
    def regions(self) -> dict[int, Region]:
        """Offsets and sizes of each rank's shard, by global rank in `mesh`; computed on access.

        See [Note: Ranks may see different meshes].
        """
        return regions(self.shape, self.mesh, self.placements)


def param_info(model: nn.Module) -> dict[str, ParamInfo]:
    """Describe every parameter that `fully_shard` manages. Not collective.

    Args:
        model: A module that is sharded, contains sharded modules, or is part of a sharded module.
    Returns:
        A description by FQN, in the order of `model.named_parameters()`. A shared parameter appears once, under its
        first name. FQNs start at `model`, see [Note: FQNs are relative to the module that was given].
    """
    found = {}
    for named in named_parameters(model):
        if named.managed is None:
            continue
        sharded = named.parameter
        assert isinstance(sharded, DTensor)
        found[named.fqn] = ParamInfo(
            group=named.group,
            shape=sharded.shape,
            dtype=sharded.dtype,
            mesh=sharded.device_mesh,
            placements=tuple(sharded.placements),
            aliases=named.aliases,
        )
    return found
