"""torch's eager FSDP2, `torch.distributed.fsdp._fully_shard`: its states, groups and parameters, by release.

Releases 2.11.0 to 2.15.0 have all the attributes declared here. A function wraps each attribute that only some of them
have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from compile_fsdp.torch_compat.declarations import needs_attributes
from compile_fsdp.torch_compat.dynamo import skip_code

# The state that `fully_shard` attaches to each module it is applied to. (2.13.0)
FSDPState = _fsdp_state.FSDPState
needs_attributes(
    FSDPState,
    *("_comm_ctx", "_device", "_is_root", "_lazy_init", "_modules", "_modules_to_run_forward", "_mp_policy"),
    *("_post_forward_hook_handle", "_pre_forward_hook_handle", "_register_root_post_backward_final_callback"),
    *("_state_ctx", "_states_to_backward_prefetch", "_states_to_forward_prefetch", "_training_state"),
)

# Contexts shared by all states of a root: the first tracks steps, the second holds streams and buffers. (2.13.0)
needs_attributes(_fsdp_state.FSDPStateContext, "all_states", "iter_forward_root", "post_backward_final_callback_queued")
needs_attributes(
    _fsdp_param_group.FSDPCommContext,
    *("all_gather_copy_in_stream", "all_gather_state", "all_gather_stream", "device_handle", "post_forward_order"),
)

# The phase of a step (idle, forward, backward) of a state or a group. (2.13.0)
TrainingState = _fsdp_common.TrainingState

# A group of parameters that are all-gathered and reduce-scattered together. (2.13.0)
FSDPParamGroup = _fsdp_param_group.FSDPParamGroup
needs_attributes(
    FSDPParamGroup,
    *("_all_gather_comm", "_all_gather_process_group", "_all_gather_result", "_all_reduce_hook"),
    *("_all_reduce_process_group", "_module_fqn", "_partial_reduce_output", "_post_reduce_event", "_reduce_dtype"),
    *("_reduce_scatter_comm", "_reduce_scatter_process_group", "_reshard_after_forward"),
    *("_reshard_after_forward_event", "_sharded_state", "_to_sharded", "_training_state"),
    *("_use_post_forward_mesh", "_with_fqn", "all_reduce_grads", "device", "finalize_backward"),
    *("force_sum_reduction_for_comms", "fsdp_params", "gradient_divide_factor", "is_unsharded", "mesh_info"),
    *("modules", "post_backward", "post_forward_mesh_info", "reduce_grads", "reshard", "reshard_after_backward"),
    *("unshard", "unshard_in_backward", "wait_for_unshard"),
)

# A managed parameter: its shard, its all-gather buffers and its unsharded parameter. (2.13.0)
FSDPParam = _fsdp_param.FSDPParam
needs_attributes(
    FSDPParam,
    *("_contiguous_orig_stride", "_module_info", "_orig_size", "_param_fqn", "_sharded_local_tensor"),
    *("_sharded_param_data", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
    *("_unsharded_inner_tensors", "_unsharded_param", "all_gather_inputs", "all_gather_outputs"),
    *("contiguous_sharded_post_forward_stride", "contiguous_sharded_stride", "device", "free_unsharded_param"),
    *("fsdp_placement", "init_all_gather_outputs", "init_unsharded_param", "is_dtensor", "mesh_info", "mp_policy"),
    *("offload_to_cpu", "orig_dtype", "padded_sharded_param_size", "param_dtype", "post_forward_mesh_info"),
    *("shard_mesh", "sharded_param", "sharded_post_forward_size", "sharded_size", "sharded_state"),
    *("to_sharded_dtensor", "to_sharded_post_forward_dtensor"),
)
needs_attributes(_fsdp_param.ParamModuleInfo, "module", "param_name", "shared_modules", "shared_param_names")

# The state of a parameter or a group: sharded, unsharded, or sharded over fewer ranks after its forward. (2.13.0)
ShardedState = _fsdp_param.ShardedState

# Resizes a tensor's storage to 0 bytes. (2.13.0)
free_storage = _fsdp_param.free_storage

# The ranks over which a group is sharded (FSDPMeshInfo), replicated (DDPMeshInfo), or both. (2.13.0)
FSDPMeshInfo = _fsdp_common.FSDPMeshInfo
DDPMeshInfo = _fsdp_common.DDPMeshInfo
needs_attributes(FSDPMeshInfo, "shard_mesh_rank", "shard_mesh_size", "shard_process_group")

# Communicators that functional collectives can replace. In the second of each pair the process group allocates the
# buffers. (2.13.0)
PLAIN_ALL_GATHERS = (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.ProcessGroupAllocAllGather)
PLAIN_REDUCE_SCATTERS = (_fsdp_collectives.DefaultReduceScatter, _fsdp_collectives.ProcessGroupAllocReduceScatter)

# Communicators over symmetric memory, which a graph cannot allocate. They exist since 2.12. (2.13.0)
SYMMETRIC_MEMORY_COMMS = tuple(
    getattr(_fsdp_collectives, name)
    for name in ("SymmMemAllGather", "SymmMemReduceScatter")
    if hasattr(_fsdp_collectives, name)
)

# The divisors of gradients before and after their reduction, and the reduce ops. (2.13.0)
gradient_divide_factors = _fsdp_collectives._get_gradient_divide_factors

# Whether FSDP2 chooses gradient dtypes by `Tensor.grad_dtype`. (2.13.0, 2.15.0)
HAS_GRAD_DTYPES = torch.__version__ >= "2.15"

# The attribute that `unsharded_spec` reads; chosen here because Dynamo cannot trace a version check. (2.11.0, 2.13.0)
_UNSHARDED_SPEC = "_unsharded_dtensor_spec" if torch.__version__ >= "2.12" else "_tp_spec"


# Without Dynamo, which would compile the frames of torch's dictionary of states, and refuse an RNN among its keys.
_find_state = torch.compiler.disable(_get_module_state)


def fsdp_state(module: nn.Module) -> FSDPState | None:
    """The FSDP2 state of a module; None if `fully_shard` was not applied to it. (2.11.0, 2.13.0)"""
    state = _find_state(module)
    return state if isinstance(state, FSDPState) else None


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """A state's parameter groups; on 2.11 at most one. (2.11.0, 2.13.0)"""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def original_class_index(cls: type) -> int:
    """Where the class of a sharded module has the user's class in its MRO. (2.13.0)"""
    return int(getattr(cls, "_orig_cls_mro_index", 2))


def order_gather_streams(state: FSDPState) -> None:
    """Make later eager all-gathers wait for the work queued so far on the current stream. (2.11.0, 2.13.0)"""
    context = state._comm_ctx
    current = context.device_handle.current_stream()
    context.all_gather_copy_in_stream.wait_stream(current)
    context.all_gather_stream.wait_stream(current)


def await_optimizer(state: FSDPState) -> None:
    """Let the current stream wait for the event of `set_post_optim_event`, as an eager forward does. (2.13.0)"""
    if (event := state._state_ctx.post_optim_event) is not None:
        torch.get_device_module(state._device).current_stream().wait_event(event)
        state._state_ctx.post_optim_event = None


def reduces_unused(group: FSDPParamGroup) -> bool:
    """Whether a group reduces zeros for parameters without a gradient (`set_reduce_scatter_unused_params`). (2.13.0)"""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def reduce_dtype(
    group: FSDPParamGroup, parameters: Sequence[FSDPParam], computed: Sequence[torch.dtype]
) -> torch.dtype | None:
    """The dtype in which gradients are reduced; None for each gradient's own dtype. (2.13.0, 2.15.0)

    The group's policy gives the dtype. Since 2.15, without a policy, its parameters with gradients of `computed` dtypes
    give it.
    """
    if group._reduce_dtype is not None or not HAS_GRAD_DTYPES:
        return group._reduce_dtype
    own = [each.unsharded_grad_dtype for each in parameters]  # type: ignore[attr-defined]
    dtypes = [dtype or of_gradient for dtype, of_gradient in zip(own, computed, strict=True)]
    if group._partial_reduce_output is not None:
        dtypes.append(group._partial_reduce_output.dtype)
    return reduce(torch.promote_types, dtypes)


def accumulation_dtype(parameter: FSDPParam) -> torch.dtype | None:
    """The dtype to which autograd casts an unsharded gradient before it accumulates it; None for no cast. (2.15.0)

    Autograd casts since 2.15. None also if the accumulation dtype is wider than the gradient, because the sum casts it.
    """
    if not HAS_GRAD_DTYPES:
        return None
    dtype: torch.dtype | None = parameter.unsharded_grad_dtype  # type: ignore[attr-defined]
    computed = parameter.param_dtype or parameter.orig_dtype
    return None if dtype is None or dtype.itemsize > computed.itemsize else dtype


def unsharded_dtype(parameter: FSDPParam) -> torch.dtype:
    """The dtype of the unsharded parameter; the shard's dtype until torch reads the mixed-precision policy. (2.13.0)"""
    return getattr(parameter, "param_dtype", None) or parameter.sharded_param.dtype


def gradient_dtype(parameter: FSDPParam) -> torch.dtype | None:
    """The dtype of a sharded parameter's gradient; since 2.15 its `grad_dtype`, where None means any. (2.15.0)"""
    name = "sharded_grad_dtype" if HAS_GRAD_DTYPES else "orig_dtype"
    dtype: torch.dtype | None = getattr(parameter, name)
    return dtype


def forget_post_backward(group: FSDPParamGroup) -> None:
    """Mark a group's gradients as reduced, even if a backward skipped the reduction; no-op before 2.15. (2.15.0)"""
    if hasattr(group, "_post_backward_pending"):
        group._post_backward_pending = False


def unsharded_spec(parameter: FSDPParam) -> DTensorSpec:
    """Mesh, placements and shape of an unsharded parameter that is a DTensor. (2.11.0, 2.13.0)"""
    spec = getattr(parameter, _UNSHARDED_SPEC)
    assert isinstance(spec, DTensorSpec)
    return spec


def data_parallel_dims(parameter: FSDPParam) -> tuple[int, ...]:
    """The mesh dims of a DTensor parameter that `dp_mesh_dims` names; empty before 2.12. (2.13.0)

    The gradient of the unsharded parameter is not redistributed over these dims.
    """
    return tuple(sorted(getattr(parameter, "_dp_dim_indices", ())))


def has_spmd_types(parameter: FSDPParam) -> bool:
    """Whether a parameter has SPMD types instead of placements; False before 2.15. (2.15.0)"""
    return bool(getattr(parameter, "is_spmd_types", False))


def parameter_owners(parameter: FSDPParam) -> list[tuple[nn.Module, str]]:
    """(module, parameter name) of each module that holds a managed parameter; several if it is shared. (2.13.0)"""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


# A model may call these before it is traced. Dynamo must not compile their frames, whose guards it may fail to read.
for _function in (fsdp_state, param_groups, parameter_owners):
    skip_code(_function.__code__)
