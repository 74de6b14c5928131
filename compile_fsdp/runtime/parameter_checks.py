"""Refuse parameters and roots that torch's initialisation cannot handle, before any collective."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import (
    ParameterDeviceError,
    ParameterDtypeError,
    ProcessGroupMissingError,
    ReplacedParameterError,
    RootError,
)
from compile_fsdp.runtime.checks import class_name, describe
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import FSDPParam, FSDPParamGroup, FSDPState, ShardedState, fsdp_state, param_groups

_log = logging.getLogger("compile_fsdp")

# Parameters of one group by FQN: torch's FSDPParam, and the tensor that the module holds in its place.
_Held = Mapping[str, tuple[FSDPParam, torch.Tensor]]


@at_run_time
def check_parameters(module: nn.Module, state: FSDPState) -> None:
    """Check a root and all modules below."""
    where = describe(state)
    if not dist.is_initialized():
        raise ProcessGroupMissingError(
            f"expected an initialised process group while compiling {where}, found none; "
            "call torch.distributed.init_process_group() before fully_shard() and keep it until training ends"
        )
    if state._is_root is None:
        _check_root(module, where)
    groups = list(_held_parameters(module))
    _check_replaced(groups, where)
    _check_devices(module, groups, state._device.type, where)
    for held in groups:
        _check_dtypes(held, where)


@at_run_time
def _held_parameters(module: nn.Module) -> Iterator[_Held]:
    fqns = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
    states = dict.fromkeys(state for state in map(fsdp_state, module.modules()) if state is not None)
    for group in (group for state in states for group in param_groups(state)):
        infos = ((param, param._module_info) for param in group.fsdp_params)
        tensors = ((param, info.param_name, getattr(info.module, info.param_name, None)) for param, info in infos)
        yield {fqns.get(id(each), name): (param, each) for param, name, each in tensors if each is not None}


@at_run_time
def _check_root(module: nn.Module, where: str) -> None:
    below = ((fqn, each, fsdp_state(each)) for fqn, each in module.named_modules() if each is not module)
    roots = [f"{fqn} ({class_name(each)})" for fqn, each, state in below if state is not None and state._is_root]
    if roots:
        raise RootError(
            f"expected the first forward to be of {where}, got earlier forwards of {', '.join(roots)}, which made each "
            "of them a root; shard the model again, and call the whole model before any of its parts"
        )


@at_run_time
def _check_replaced(groups: list[_Held], where: str) -> None:
    replaced = [
        fqn
        for held in groups
        for fqn, (param, tensor) in held.items()
        if param.sharded_state == ShardedState.SHARDED and not isinstance(tensor, DTensor)
    ]
    if replaced:
        raise ReplacedParameterError(
            f"expected sharded parameters in {where}, got tensors that are not at {replaced}, which were put there "
            "after fully_shard(); load unsharded tensors with torch.distributed.checkpoint.state_dict."
            "set_model_state_dict(), and replace parameters before fully_shard()"
        )


@at_run_time
def finds_substitute(groups: Iterable[FSDPParamGroup]) -> bool:
    """Return whether a module holds a tensor of the user in place of an unsharded parameter, and warn.

    Eager FSDP2 computes with such a tensor, for example that of `torch.func.functional_call`. In place of a sharded
    parameter it puts the gathered one.
    """
    for group in groups:
        for param in group.fsdp_params if group._sharded_state is ShardedState.UNSHARDED else ():
            own = param._unsharded_param, param.sharded_param
            for module, name in _places(param):
                if all(module._parameters.get(name) is not each for each in own):
                    _warn_of_substitute(param._param_fqn or name)
                    return True
    return False


@at_run_time
def put_sharded_back(groups: Iterable[FSDPParamGroup]) -> None:
    """Register the sharded parameters where a substitute's user has put unsharded ones back behind the reshard."""
    for group in groups:
        for param in group.fsdp_params if group._sharded_state is ShardedState.SHARDED else ():
            for module, name in _places(param):
                if module._parameters.get(name) is getattr(param, "_unsharded_param", None):
                    module._parameters[name] = param.sharded_param


@at_run_time
def _places(param: FSDPParam) -> list[tuple[nn.Module, str]]:
    """Return the modules that hold a parameter, with its names there."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


@cache
def _warn_of_substitute(fqn: str) -> None:
    _log.warning("a forward with another tensor in place of the unsharded parameter %s runs eagerly", fqn)


@at_run_time
def _check_devices(module: nn.Module, groups: list[_Held], device: str, where: str) -> None:
    offloaded = {id(tensor) for held in groups for param, tensor in held.values() if param.offload_to_cpu}
    parameters = [(fqn, each) for fqn, each in module.named_parameters() if isinstance(each, DTensor)]
    for expected, is_offloaded in (("cpu", True), (device, False)):
        wrong = {
            fqn: each.device.type
            for fqn, each in parameters
            if each.device.type != expected and (id(each) in offloaded) == is_offloaded
        }
        on_meta = [fqn for fqn, found in wrong.items() if found == "meta"]
        if on_meta:
            raise ParameterDeviceError(
                f"expected parameters with data, got {on_meta} of {where} on the meta device; "
                f"call model.to_empty(device={expected!r}) and initialise them, or load a state_dict, first"
            )
        if wrong:
            raise ParameterDeviceError(
                f"expected the parameters of {where} on {expected}, got {wrong}; "
                f"move the model back with model.to({expected!r})"
            )


@at_run_time
def _check_dtypes(held: _Held, where: str) -> None:
    dtypes = {fqn: tensor.dtype for fqn, (_, tensor) in held.items() if tensor.requires_grad}
    if len(set(dtypes.values())) > 1:
        common = Counter(dtypes.values()).most_common(1)[0][0]
        others = {fqn: str(dtype) for fqn, dtype in dtypes.items() if dtype != common}
        raise ParameterDtypeError(
            f"expected trainable parameters of one dtype in each group of {where}, got {common} and {others}; "
            "convert or freeze these before fully_shard(), or shard the modules that hold them by calls of their own"
        )
