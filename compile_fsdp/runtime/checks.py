"""Refuse untraceable features, parameters and roots before any collective, with the FQN and a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import (
    OutputTypeError,
    ParameterDeviceError,
    ParameterDtypeError,
    ProcessGroupMissingError,
    ReplacedParameterError,
    RootError,
    UnsupportedFeatureError,
)
from compile_fsdp.runtime.subclass_parameters import find_subclass, has_plain_parts
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.dynamo_limits import traces_rnns
from compile_fsdp.torch_compat.fsdp import (
    SYMMETRIC_MEMORY_COMMS,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    fsdp_state,
    has_spmd_types,
    param_groups,
)

# Parameters of one group by FQN: torch's FSDPParam, and the tensor that the module holds in its place.
_Held = Mapping[str, tuple[FSDPParam, torch.Tensor]]


@at_run_time
def class_name(module: nn.Module) -> str:
    """Return the name of the user's class, without torch's prefix FSDP."""
    return type(module).__name__.removeprefix("FSDP")


@at_run_time
def describe(state: FSDPState) -> str:
    """Return the first module's FQN, once its root is known, and its class: `layers.3 (Block)`."""
    fqns = [group._module_fqn for group in param_groups(state) if group._module_fqn]
    name = class_name(state._modules[0])
    return f"{fqns[0]} ({name})" if fqns else f"the root ({name})" if state._is_root else name


@at_run_time
def check_group(group: FSDPParamGroup) -> None:
    """Refuse a parameter group with a feature that has no traced counterpart yet."""
    comms = [type(each) for each in (group._all_gather_comm, group._reduce_scatter_comm)]
    symmetric = [comm.__name__ for comm in comms if issubclass(comm, SYMMETRIC_MEMORY_COMMS)]
    spmd = [param._param_fqn for param in group.fsdp_params if has_spmd_types(param)]
    if symmetric or spmd:
        reason = f"symmetric memory for its collectives ({symmetric[0]})" if symmetric else f"{spmd[0]}: SPMD types"
        raise UnsupportedFeatureError(_refusal(group._module_fqn or "the root", reason))
    owners = {id(info.module): info.module for param in group.fsdp_params for info in [param._module_info]}
    for module in owners.values():
        # Dynamo leaves its forward to eager code, which reads the weights from a list of its own.
        if isinstance(module, nn.RNNBase) and module not in group.modules and not traces_rnns():
            name = type(module).__name__
            reason = f"the parameters of its {name}: shard the {name} by itself, with fully_shard()"
            raise UnsupportedFeatureError(_refusal(group._module_fqn or "the root", reason))


@at_run_time
def check_shard(param: FSDPParam) -> None:
    """Refuse a sharded tensor subclass if a graph would lose a part, such as a precomputed scale."""
    shard: Any = param._sharded_local_tensor
    names, context = shard.__tensor_flatten__()
    inner = {name: getattr(shard, name) for name in names}
    again = type(shard).__tensor_unflatten__(inner, context, shard.size(), shard.stride())
    if lost := sorted({*names} - {*again.__tensor_flatten__()[0]}):
        reason = f"{', '.join(lost)} of its {type(shard).__name__}, which __tensor_unflatten__ leaves out"
        raise UnsupportedFeatureError(_refusal(str(param._param_fqn), reason))


@at_run_time
def check_unsharded(param: FSDPParam) -> None:
    """Refuse an all-gather extension that returns a tensor subclass whose parts a graph cannot fill."""
    kind = find_subclass(param)
    if kind is not None and not has_plain_parts(param):
        reason = f"an all-gather extension that returns a {kind.__name__}, not made of plain tensors"
        raise UnsupportedFeatureError(_refusal(str(param._param_fqn), reason))


@eval_at_trace_time_guarded
def refuse_pending_unshard(state: FSDPState) -> NoReturn:
    """Refuse a module whose asynchronous unshard nobody has waited for."""
    reason = "a pending unshard(async_op=True): wait on its handle first, or compile with the model's own compile()"
    raise UnsupportedFeatureError(_refusal(describe(state), reason))


@at_run_time
def refuse_eager_slices(state: FSDPState) -> NoReturn:
    """Refuse a module whose post-forward shards an eager forward has kept."""
    reason = "post-forward shards of an eager forward: call its reshard() first"
    raise UnsupportedFeatureError(_refusal(describe(state), reason))


@eval_at_trace_time_guarded
def refuse_substitute(state: FSDPState, name: str) -> NoReturn:
    """Refuse a tensor that has replaced an unsharded parameter, because the graph would replace it again."""
    raise ReplacedParameterError(
        f"expected the unsharded parameter {name} in {describe(state)}, got another tensor in its place, as "
        "torch.func.functional_call puts there; compile with the model's own compile(), which runs such a call eagerly"
    )


@at_run_time
def _refusal(where: str, reason: str) -> str:
    return (
        f"{where} cannot be compiled with {reason}; train without it, or run the model eagerly, "
        "where it behaves as torch's own fully_shard does"
    )


@eval_at_trace_time_guarded
def refuse_output(state: FSDPState, types: tuple[str, ...]) -> NoReturn:
    """Refuse an output without tensors that need a gradient but with objects of these types."""
    raise OutputTypeError(
        f"expected the forward of {describe(state)} to return tensors in lists, tuples, dicts or "
        f"dataclasses, got {', '.join(types)}: FSDP2 must find the tensors to know when their backward starts"
    )


# Parameters and roots that torch's initialisation cannot handle


@at_run_time
def check_parameters(state: FSDPState) -> None:
    """Check a root and all modules below."""
    module, where = state._modules[0], describe(state)
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
def _check_devices(module: nn.Module, groups: list[_Held], device: str, where: str) -> None:
    offloaded = {
        id(tensor)
        for held in groups
        for param, tensor in held.values()
        if param.offload_to_cpu and param.sharded_state == ShardedState.SHARDED
    }
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
