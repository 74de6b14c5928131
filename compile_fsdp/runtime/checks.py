"""Refuse, before any collective, what cannot be traced: with the FQN and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import (
    OutputTypeError,
    ParameterDeviceError,
    ProcessGroupMissingError,
    UnsupportedFeatureError,
)
from compile_fsdp.runtime.subclass_parameters import find_subclass, has_plain_parts, lost_parts
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.fsdp import (
    SYMMETRIC_MEMORY_COMMS,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    fsdp_state,
    has_spmd_types,
    param_groups,
)

if TYPE_CHECKING:
    from compile_fsdp.runtime.hooks import StateHooks


@at_run_time
def describe(module: nn.Module, state: FSDPState) -> str:
    """`layers.3 (Block)`: the module's FQN, as far as its root is known, and its class."""
    fqns = [group._module_fqn for group in param_groups(state) if group._module_fqn]
    name = type(module).__name__.removeprefix("FSDP")
    return f"{fqns[0]} ({name})" if fqns else f"the root ({name})" if state._is_root else name


@at_run_time
def check_parameters(module: nn.Module, state: FSDPState) -> None:
    """Check what torch's own initialisation takes for granted, for a root and all modules below.

    Raises:
        ProcessGroupMissingError: no process group is initialised.
        ParameterDeviceError: a parameter is on meta, or not on the mesh's device.
    """
    if not dist.is_initialized():
        raise ProcessGroupMissingError(
            f"expected an initialised process group while compiling {describe(module, state)}, found none; "
            "call torch.distributed.init_process_group() before fully_shard() and keep it until training ends"
        )
    expected = state._device.type
    offloaded = _offloaded(module)
    wrong = {
        fqn: parameter.device.type
        for fqn, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) and parameter.device.type != expected and id(parameter) not in offloaded
    }
    on_meta = [fqn for fqn, device in wrong.items() if device == "meta"]
    if on_meta:
        raise ParameterDeviceError(
            f"expected parameters with data, got {on_meta} of {describe(module, state)} on the meta device; "
            f"call model.to_empty(device={expected!r}) and initialise them, or load a state_dict, first"
        )
    if wrong:
        raise ParameterDeviceError(
            f"expected the parameters of {describe(module, state)} on {expected}, got {wrong}; "
            f"move the model back with model.to({expected!r})"
        )


@at_run_time
def _offloaded(module: nn.Module) -> set[int]:
    states = (fsdp_state(each) for each in module.modules())
    groups = (group for state in states if state is not None for group in param_groups(state))
    return {id(param.sharded_param) for group in groups for param in group.fsdp_params if param.offload_to_cpu}


@at_run_time
def check_group(group: FSDPParamGroup) -> None:
    """Refuse features of a parameter group that have no traced counterpart yet.

    Raises:
        UnsupportedFeatureError: names the module, the parameter and the feature.
    """
    reason = _unsupported_structure(group)
    if reason is not None:
        raise UnsupportedFeatureError(_refusal(f"{group._module_fqn or 'the root'}", reason))


@at_run_time
def _unsupported_structure(group: FSDPParamGroup) -> str | None:
    for comm in (group._all_gather_comm, group._reduce_scatter_comm):
        if isinstance(comm, SYMMETRIC_MEMORY_COMMS):
            return f"symmetric memory for its collectives ({type(comm).__name__})"
    for param in group.fsdp_params:
        if has_spmd_types(param):
            return f"{param._param_fqn}: SPMD types"
    return None


@at_run_time
def check_shard(param: FSDPParam) -> None:
    """Refuse a sharded tensor subclass of which a graph would lose a part, such as a scale that was computed ahead.

    Raises:
        UnsupportedFeatureError: names the parameter, the subclass and the parts.
    """
    shard = param._sharded_local_tensor
    if lost := lost_parts(shard):
        reason = f"{', '.join(lost)} of its {type(shard).__name__}, which __tensor_unflatten__ leaves out"
        raise UnsupportedFeatureError(_refusal(str(param._param_fqn), reason))


@at_run_time
def check_unsharded(param: FSDPParam) -> None:
    """Refuse an all-gather extension that returns a tensor subclass of which a graph cannot fill the parts.

    Raises:
        UnsupportedFeatureError: names the parameter and the subclass.
    """
    kind = find_subclass(param)
    if kind is not None and not has_plain_parts(param):
        reason = f"an all-gather extension that returns a {kind.__name__}, not made of plain tensors"
        raise UnsupportedFeatureError(_refusal(str(param._param_fqn), reason))


def unsupported_setting(group: FSDPParamGroup) -> str | None:
    """Name the setting of a group that has no traced counterpart yet.

    Traced with the model, so that a setting that changes later is noticed by a guard.
    """
    if group._all_gather_result is not None:
        return "a pending unshard(async_op=True): wait on its handle first, or compile with the model's own compile()"
    return None


@eval_at_trace_time_guarded
def refuse(hooks: StateHooks, reason: str) -> NoReturn:
    """Refuse a setting, or another thing that a step finds."""
    raise UnsupportedFeatureError(_refusal(describe(hooks.module, hooks.state), reason))


@at_run_time
def _refusal(where: str, reason: str) -> str:
    return (
        f"{where} cannot be compiled with {reason}; train without it, or run the model eagerly, "
        "where it behaves as torch's own fully_shard does"
    )


@eval_at_trace_time_guarded
def refuse_output(hooks: StateHooks, types: tuple[str, ...]) -> NoReturn:
    """Refuse an output in which no tensor can be found, but objects of these types."""
    raise OutputTypeError(
        f"expected the forward of {describe(hooks.module, hooks.state)} to return tensors in lists, tuples, dicts or "
        f"dataclasses, got {', '.join(types)}: FSDP2 must find the tensors to know when their backward starts"
    )
