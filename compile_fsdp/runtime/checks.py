"""Refuse untraceable features before any collective, with the FQN and a remedy."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from compile_fsdp.errors import OutputTypeError, ReplacedParameterError, UnsupportedFeatureError
from compile_fsdp.runtime.subclass_parameters import find_subclass, has_plain_parts
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.dynamo_limits import traces_rnns
from compile_fsdp.torch_compat.fsdp import (
    SYMMETRIC_MEMORY_COMMS,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    has_spmd_types,
    param_groups,
)


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
