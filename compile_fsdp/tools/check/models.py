"""Describe the sharded models of a script: parameter groups, compile settings and captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from compile_fsdp.reports import Direction
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.module import TraceableModule
from compile_fsdp.torch_compat.dynamo import CompileSettings, OptimizedModule, compile_settings
from compile_fsdp.torch_compat.fsdp import (
    FSDPParamGroup,
    FSDPState,
    fsdp_state,
    param_groups,
    parameter_owners,
    unsharded_dtype,
)
from compile_fsdp.wrap.tree import ROOT

# As in `Capture.traced` and `Capture.models`.
Traced = Mapping[Direction, Collection[tuple[TraceableGroup, ...]]]
Names = Mapping[FSDPState, str]


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    name: str  # FQNs of the group's modules
    parameters: tuple[str, ...]  # FQNs
    unsharded_bytes: int  # in the dtype that the modules compute with
    reshards: bool  # after the group's forward
    is_captured: bool  # in a compiled forward graph
    is_last: bool  # whether a forward graph uses the group last, so that the backward begins with the group


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """An outermost module with `fully_shard`, and its submodules."""

    name: str  # of the module's class, with a number if an earlier model of the capture has it
    is_traceable: bool  # whether all sharded modules in the model are traceable
    settings: CompileSettings | None  # of the model or of a module that contains it; None if neither is compiled
    compiled_parts: tuple[str, ...]  # FQNs of submodules that are compiled separately
    groups: tuple[ShardedGroup, ...]
    forward_graphs: int  # compiled graphs with groups of the model
    backward_graphs: int
    is_whole: bool  # whether a single forward graph has all groups of the model
    trains: bool  # whether a parameter of the model requires a gradient
    has_run: bool  # whether its forward has run

    @property
    def is_captured(self) -> bool:
        return any(group.is_captured for group in self.groups)


def find_modules() -> Iterator[nn.Module]:
    """Yield the live modules that are sharded or compiled."""
    # By the type, because isinstance() may run code of an object.
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and (issubclass(type(each), FSDPModule) or _is_compiled(each)):
            yield each


def describe_models(modules: Collection[nn.Module], traced: Traced, names: Names) -> tuple[ShardedModel, ...]:
    """Describe the models among sharded and compiled modules, in the order of their roots."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    below = {id(each) for module in sharded for each in module.modules() if each is not module}
    compiled = [module for module in modules if _is_compiled(module)]
    return tuple(_describe(module, compiled, traced, names) for module in sharded if id(module) not in below)


def _is_compiled(module: nn.Module) -> bool:
    return type(module) is OptimizedModule or vars(module).get("_compiled_call_impl") is not None


def _describe(root: nn.Module, compiled: Collection[nn.Module], traced: Traced, names: Names) -> ShardedModel:
    fqns = {module: fqn for fqn, module in root.named_modules()}
    states = (fsdp_state(module) for module in fqns)
    found = dict.fromkeys(group for state in states if state is not None for group in param_groups(state)).keys()
    around = (each for each in compiled if any(module is root for module in each.modules()))
    settings = (compile_settings(vars(each).get("_compiled_call_impl") or each) for each in around)
    halves = traced["forward"], traced["backward"]
    forward, backward = ([[group.fsdp_group for group in groups] for groups in half] for half in halves)
    seen = {group for groups in forward for group in groups}
    last = {groups[-1] for groups in forward if groups}
    state = fsdp_state(root)
    known = None if state is None else names.get(state)
    return ShardedModel(
        name=known or type(root).__name__.removeprefix("FSDP"),
        is_traceable=all(isinstance(each, TraceableModule) for each in root.modules() if isinstance(each, FSDPModule)),
        settings=next(settings, None),
        compiled_parts=tuple(sorted(fqns[each] for each in compiled if each in fqns and each is not root)),
        groups=tuple(_describe_group(group, fqns, seen, last) for group in found),
        forward_graphs=sum(not found.isdisjoint(groups) for groups in forward),
        backward_graphs=sum(not found.isdisjoint(groups) for groups in backward),
        is_whole=any(found <= set(groups) for groups in forward),
        trains=any(parameter.requires_grad for parameter in root.parameters()),
        has_run=state is not None and state._is_root is not None,
    )


def _describe_group(
    group: FSDPParamGroup, fqns: dict[nn.Module, str], seen: set[FSDPParamGroup], last: set[FSDPParamGroup]
) -> ShardedGroup:
    owners = [parameter_owners(parameter)[0] for parameter in group.fsdp_params]
    sizes = (each.sharded_param.numel() * unsharded_dtype(each).itemsize for each in group.fsdp_params)
    return ShardedGroup(
        name=", ".join(fqns[module] or ROOT for module in group.modules if module in fqns),
        parameters=tuple(f"{fqns[module]}.{name}".removeprefix(".") for module, name in owners if module in fqns),
        unsharded_bytes=sum(sizes),
        reshards=group.post_forward_mesh_info is not None,
        is_captured=group in seen,
        is_last=group in last,
    )
