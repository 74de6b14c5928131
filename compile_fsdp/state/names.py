"""Names of parameters that do not change with sharding, compilation or activation checkpointing, and their shards.

[Note: FQNs are relative to the module that was given]
An FQN is the path from the module that is the function's argument, as in that module's `named_parameters()`. Wrapper
modules (`torch.compile(module)`, activation checkpointing, DDP) do not appear in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from compile_fsdp.errors import ForeignParameterError
from compile_fsdp.state.containers import join
from compile_fsdp.state.layout import Region, regions
from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups, parameter_owners
from compile_fsdp.torch_compat.nn import wrapped_child


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter with all its names and its FSDP2 group."""

    fqn: str  # the first, in the order of the modules
    aliases: tuple[str, ...]  # further FQNs, if modules share the parameter
    parameter: nn.Parameter  # the one that an optimizer holds: sharded, also while the model is unsharded
    group: tuple[str, ...]  # FQNs of the modules whose FSDP2 group has the parameter; empty if no group has it

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fqn, *self.aliases)


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
        """Each rank's shard, by global rank; computed on access. See [Note: Ranks may see different meshes]."""
        return regions(self.shape, self.mesh, self.placements)


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(FQN, module) for `root` and every module below it, parents first, once for each path."""
    found = {"": ("", root)}  # by path
    for path, module in root.named_modules(remove_duplicate=False):
        if path:
            parent, _, name = path.rpartition(".")
            fqn, holder = found[parent]
            found[path] = (fqn if wrapped_child(holder) == name else join(fqn, name), module)
    return list(found.values())


def named_parameters(root: nn.Module) -> list[NamedParameter]:
    """Each parameter below `root` once, in the order of `root.named_parameters()`."""
    modules = named_modules(root)
    first_names = {module: fqn for fqn, module in reversed(modules)}
    managed: dict[tuple[nn.Module, str], tuple[nn.Parameter, tuple[str, ...]]] = {}
    for module in first_names:
        state = fsdp_state(module)
        for group in [] if state is None else param_groups(state):
            fqns = tuple(first_names[each] for each in group.modules if each in first_names)
            for fsdp_param in group.fsdp_params:
                managed.update((owner, (fsdp_param.sharded_param, fqns)) for owner in parameter_owners(fsdp_param))

    found: dict[nn.Parameter, tuple[tuple[str, ...], list[str]]] = {}  # group and names
    for fqn, module in modules:
        for name, held in module.named_parameters(recurse=False, remove_duplicate=False):
            parameter, group_fqns = managed.get((module, name), (held, ()))
            found.setdefault(parameter, (group_fqns, []))[1].append(join(fqn, name))
    return [
        NamedParameter(first, tuple(dict.fromkeys(others)), parameter, group_fqns)
        for parameter, (group_fqns, (first, *others)) in found.items()
    ]


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
        if not named.group:
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


def named_groups(root: nn.Module, optim: Optimizer) -> list[list[NamedParameter]]:
    """The parameters of each of the optimizer's groups; raises if the model does not have all of them."""
    by_parameter = {named.parameter: named for named in named_parameters(root)}
    foreign = [
        f"group {number}, parameter {index}, shape {list(parameter.shape)}"
        for number, group in enumerate(optim.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in by_parameter
    ]
    if foreign:
        raise ForeignParameterError(
            f"expected an optimizer over parameters of {type(root).__name__}, got others: {'; '.join(foreign)}; "
            "make the optimizer after the last fully_shard() call, and pass the module that has all its parameters"
        )
    return [[by_parameter[parameter] for parameter in group["params"]] for group in optim.param_groups]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an optimizer's parameter group that are options."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
