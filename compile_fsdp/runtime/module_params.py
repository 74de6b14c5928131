"""Parameters that the modules of a group hold, in a step and after a forward."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch

from compile_fsdp.runtime.calls import outermost
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time
from compile_fsdp.torch_compat.fsdp import FSDPParam, FSDPParamGroup, ShardedState, parameter_owners

_log = logging.getLogger("compile_fsdp")


def save(group: TraceableGroup) -> None:
    """Remember the parameters that the modules hold, if they must hold them again after the forward.

    For Dynamo, a dict that gets its old values back is unchanged, so the sharded parameters are neither written after
    each step, nor graph inputs, nor guarded. This code has no function for each parameter, because Dynamo takes a
    millisecond to enter a function.
    """
    fsdp_group = group.fsdp_group
    ends_sharded = fsdp_group.post_forward_mesh_info is fsdp_group.mesh_info
    if ends_sharded and not group.constants.is_tied and not group.is_post_forward and _is_below_a_call():
        infos = [param.fsdp_param._module_info for param in group.params]
        group.saved = [info.module._parameters[info.param_name] for info in infos]


def restore(group: TraceableGroup) -> None:
    """Put the saved parameters back after a forward, or else register the sharded parameters."""
    if not group.saved:
        register_sharded(group)
        return
    for param, value in zip(group.params, group.saved, strict=True):
        info = param.fsdp_param._module_info
        info.module._parameters[info.param_name] = value
    group.saved = ()


def register_unsharded(group: TraceableGroup) -> None:
    """Let the modules hold the tensors that the graph computes with."""
    if not group.saved:  # else `restore` undoes it before code outside reads the states
        sync_states(group)
        group.is_hidden = False
    for param in group.params:
        register(param.fsdp_param, param.traced())


def register_sharded(group: TraceableGroup) -> None:
    """Let the modules hold the sharded parameters of a group that is sharded."""
    sync_states(group)
    for param in group.params:
        register(param.fsdp_param, param.fsdp_param.sharded_param)


def reshard_after_forward(group: TraceableGroup) -> None:
    """Apply the group's `reshard_after_forward`, and register the parameters that it leaves."""
    mesh_info = group.fsdp_group.post_forward_mesh_info
    if mesh_info is group.fsdp_group.mesh_info:
        group.reshard()
        restore(group)
    elif mesh_info is None:
        for param in group.params:
            if param.fsdp_param.is_dtensor or param.parts is not None:
                register(param.fsdp_param, param.fsdp_param._unsharded_param)  # for eager code
    else:
        group.keep_slices()
        sync_states(group)
        for param in group.params:
            assert param.post_forward is not None
            register(param.fsdp_param, param.post_forward.parameter)


def sync_states(group: TraceableGroup) -> None:
    """Set the parameters' states, which only code outside of graphs reads, to the group's state.

    Dynamo takes milliseconds to write each, so a backward that unshards and reshards a group leaves them alone.
    """
    state = group.fsdp_group._sharded_state
    for param in group.params:
        param.fsdp_param.sharded_state = state


def register(fsdp_param: FSDPParam, value: torch.Tensor) -> None:
    """Let the modules that share a parameter hold `value` in its place."""
    info = fsdp_param._module_info
    info.module._parameters[info.param_name] = value  # type: ignore[assignment]
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        module._parameters[name] = value  # type: ignore[assignment]


@eval_at_trace_time
def _is_below_a_call() -> bool:
    """Return whether a sharded module's call, which copies `requires_grad` before each step, is outside of the trace.

    Without it, graphs must read the sharded parameters so that Dynamo guards their `requires_grad`.
    """
    return outermost() is not None


@at_run_time
def finds_substitute(groups: Iterable[FSDPParamGroup]) -> bool:
    """Return whether a module holds a tensor of the user in place of an unsharded parameter, and warn.

    Eager FSDP2 computes with such a tensor, for example that of `torch.func.functional_call`. In place of a sharded
    parameter it puts the gathered one.
    """
    for group in groups:
        for param in group.fsdp_params if group._sharded_state is ShardedState.UNSHARDED else ():
            own = param._unsharded_param, param.sharded_param
            for module, name in parameter_owners(param):
                if all(module._parameters.get(name) is not each for each in own):
                    _warn_of_substitute(param._param_fqn or name)
                    return True
    return False


@at_run_time
def reshard_eager_slices(groups: Iterable[TraceableGroup]) -> None:
    """Reshard groups of which eager code has kept post-forward shards, because graphs do not read these."""
    for group in groups:
        if group.has_eager_slices:
            group.fsdp_group._to_sharded()
            for fsdp_param in group.fsdp_group.fsdp_params:
                fsdp_param._sharded_post_forward_param_data = fsdp_param._sharded_post_forward_param = None


@at_run_time
def put_sharded_back(groups: Iterable[FSDPParamGroup]) -> None:
    """Register the sharded parameters where a substitute's user has put unsharded ones back behind the reshard."""
    for group in groups:
        for param in group.fsdp_params if group._sharded_state is ShardedState.SHARDED else ():
            for module, name in parameter_owners(param):
                if module._parameters.get(name) is getattr(param, "_unsharded_param", None):
                    module._parameters[name] = param.sharded_param


@cache
def _warn_of_substitute(fqn: str) -> None:
    _log.warning("a forward with another tensor in place of the unsharded parameter %s runs eagerly", fqn)
