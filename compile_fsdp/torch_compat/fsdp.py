"""torch's eager FSDP2, `torch.distributed.fsdp._fully_shard`: what its `fully_shard` makes, by release.

The attributes that are declared here are those of 2.11.0 to 2.15.0. What only some of these releases have is behind a
function.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from compile_fsdp.torch_compat.declarations import needs, needs_attributes
from compile_fsdp.torch_compat.dynamo import skip_code

# What `fully_shard` keeps for each module that it is applied to. (2.13.0)
FSDPState = _fsdp_state.FSDPState
needs_attributes(
    FSDPState,
    *("_comm_ctx", "_device", "_is_root", "_lazy_init", "_modules", "_modules_to_run_forward", "_mp_policy"),
    *("_post_forward_hook_handle", "_pre_forward_hook_handle", "_register_root_post_backward_final_callback"),
    *("_state_ctx", "_states_to_backward_prefetch", "_states_to_forward_prefetch", "_training_state"),
)

# What all states of a root share: the first about steps, the second about communication. (2.13.0)
needs_attributes(_fsdp_state.FSDPStateContext, "all_states", "iter_forward_root", "post_backward_final_callback_queued")
needs_attributes(
    _fsdp_param_group.FSDPCommContext,
    *("all_gather_copy_in_stream", "all_gather_state", "all_gather_stream", "device_handle", "post_forward_order"),
)

# In which part of a step a state, or a group, is. (2.13.0)
TrainingState = _fsdp_common.TrainingState

# Parameters that are gathered and reduced together. (2.13.0)
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

# One parameter: its shard, its buffers of a gather and its unsharded self. (2.13.0)
FSDPParam = _fsdp_param.FSDPParam
needs_attributes(
    FSDPParam,
    *("_contiguous_orig_stride", "_module_info", "_orig_size", "_param_fqn", "_sharded_local_tensor"),
    *("_sharded_param_data", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
    *("_unsharded_inner_tensors", "_unsharded_param", "all_gather_inputs", "all_gather_outputs"),
    *("contiguous_sharded_post_forward_stride",),
    *("contiguous_sharded_stride", "device", "free_unsharded_param", "fsdp_placement", "init_all_gather_outputs"),
    *("init_unsharded_param", "is_dtensor", "mesh_info", "mp_policy", "offload_to_cpu", "orig_dtype"),
    *("padded_sharded_param_size", "param_dtype", "post_forward_mesh_info", "shard_mesh", "sharded_param"),
    *("sharded_post_forward_size", "sharded_size", "sharded_state", "to_sharded_dtensor"),
    *("to_sharded_post_forward_dtensor",),
)
needs_attributes(_fsdp_param.ParamModuleInfo, "module", "param_name", "shared_modules", "shared_param_names")

# Whether a parameter, or a group, is sharded now, unsharded, or sharded over fewer ranks after its forward. (2.13.0)
ShardedState = _fsdp_param.ShardedState

# Resizes a tensor's storage to nothing. (2.13.0)
free_storage = _fsdp_param.free_storage

# Over which ranks a group is sharded (FSDPMeshInfo), replicated (DDPMeshInfo), or both. (2.13.0)
FSDPMeshInfo = _fsdp_common.FSDPMeshInfo
DDPMeshInfo = _fsdp_common.DDPMeshInfo
needs_attributes(FSDPMeshInfo, "shard_mesh_rank", "shard_mesh_size", "shard_process_group")

# Communicators that do what the functional collectives do; the second of each differs in who allocates. (2.13.0)
PLAIN_ALL_GATHERS = (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.ProcessGroupAllocAllGather)
PLAIN_REDUCE_SCATTERS = (_fsdp_collectives.DefaultReduceScatter, _fsdp_collectives.ProcessGroupAllocReduceScatter)

# Communicators over symmetric memory, which a graph cannot allocate; since 2.12. (2.13.0)
SYMMETRIC_MEMORY_COMMS = tuple(
    getattr(_fsdp_collectives, name)
    for name in ("SymmMemAllGather", "SymmMemReduceScatter")
    if hasattr(_fsdp_collectives, name)
)

# By what gradients are divided before and after they are reduced, and with which reductions. (2.13.0)
gradient_divide_factors = _fsdp_collectives._get_gradient_divide_factors

# Whether FSDP2 holds the input of a group's reduction until that of the next group is over. (2.12.0)
HOLDS_REDUCE_INPUT = "2.12" <= torch.__version__ < "2.13"

# Whether gradients of FSDP2 are built around `Tensor.grad_dtype`. (2.13.0, 2.15.0)
HAS_GRAD_DTYPES = torch.__version__ >= "2.15"

# The attribute for `unsharded_spec`. Dynamo cannot trace a comparison of versions. (2.11.0, 2.13.0)
_UNSHARDED_SPEC = "_unsharded_dtensor_spec" if torch.__version__ >= "2.12" else "_tp_spec"


@needs("torch.distributed._composable_state._get_module_state")
def fsdp_state(module: nn.Module) -> FSDPState | None:
    """The FSDP2 state of a module that `fully_shard` was applied to, else None. (2.13.0)"""
    from torch.distributed._composable_state import _get_module_state

    state = _get_module_state(module)
    return state if isinstance(state, FSDPState) else None


def param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The state's parameter groups: a list since 2.12, one optional group on 2.11. (2.11.0, 2.13.0)"""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


# Where a model calls them before it is traced, they are no frames to compile: the guards of one may fail to be read.
for _each in (fsdp_state, param_groups):
    skip_code(_each.__code__)


def order_gather_streams(state: FSDPState) -> None:
    """Let eager gathers from now on come behind all that the current stream has been given. (2.11.0, 2.13.0)"""
    context = state._comm_ctx
    current = context.device_handle.current_stream()
    context.all_gather_copy_in_stream.wait_stream(current)
    context.all_gather_stream.wait_stream(current)


def reduces_unused(group: FSDPParamGroup) -> bool:
    """Whether zeros are reduced for parameters without a gradient, see `set_reduce_scatter_unused_params`. (2.13.0)"""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def reduce_dtype(
    group: FSDPParamGroup, parameters: Sequence[FSDPParam], computed: Sequence[torch.dtype]
) -> torch.dtype | None:
    """In which dtype gradients are reduced; None for their own. (2.13.0, 2.15.0)

    Args:
        group: Whose policy tells. Without one, since 2.15, the parameters do.
        parameters: Those that have a gradient.
        computed: The dtypes of these gradients.
    """
    if group._reduce_dtype is not None or not HAS_GRAD_DTYPES:
        return group._reduce_dtype
    own = [each.unsharded_grad_dtype for each in parameters]  # type: ignore[attr-defined]
    dtypes = [dtype or of_gradient for dtype, of_gradient in zip(own, computed, strict=True)]
    if group._partial_reduce_output is not None:
        dtypes.append(group._partial_reduce_output.dtype)
    return reduce(torch.promote_types, dtypes)


def accumulation_dtype(parameter: FSDPParam) -> torch.dtype | None:
    """To which dtype each unsharded gradient is cast before it is added to earlier ones; None for its own. (2.15.0)

    Autograd does so since 2.15. A wider dtype than that of the gradient is left to the sum.
    """
    if not HAS_GRAD_DTYPES:
        return None
    dtype: torch.dtype | None = parameter.unsharded_grad_dtype  # type: ignore[attr-defined]
    computed = parameter.param_dtype or parameter.orig_dtype
    return None if dtype is None or dtype.itemsize > computed.itemsize else dtype


def unsharded_dtype(parameter: FSDPParam) -> torch.dtype:
    """The dtype that a parameter is gathered in; before torch has looked at its policy, that of the shard. (2.13.0)"""
    return getattr(parameter, "param_dtype", None) or parameter.sharded_param.dtype


def gradient_dtype(parameter: FSDPParam) -> torch.dtype | None:
    """The dtype of a sharded parameter's gradient: its own, or since 2.15 `grad_dtype`; None for any. (2.15.0)"""
    name = "sharded_grad_dtype" if HAS_GRAD_DTYPES else "orig_dtype"
    dtype: torch.dtype | None = getattr(parameter, name)
    return dtype


def forget_post_backward(group: FSDPParamGroup) -> None:
    """Say that the group's gradients are reduced, also those of backwards that did not; since 2.15. (2.15.0)"""
    if hasattr(group, "_post_backward_pending"):
        group._post_backward_pending = False


def await_post_reduce(group: FSDPParamGroup) -> None:
    """Let the current stream wait for the reduction that eager FSDP2 has launched last for the group. (2.13.0)"""
    if (event := group._post_reduce_event) is not None:
        group.device_handle.current_stream().wait_event(event)


def unsharded_spec(parameter: FSDPParam) -> DTensorSpec:
    """Mesh, placements and shape of the unsharded parameter, which is a DTensor. (2.11.0, 2.13.0)"""
    spec = getattr(parameter, _UNSHARDED_SPEC)
    assert isinstance(spec, DTensorSpec)
    return spec


def data_parallel_dims(parameter: FSDPParam) -> tuple[int, ...]:
    """The data-parallel dims of the mesh of a DTensor parameter, if `dp_mesh_dims` has named them; since 2.12. (2.13.0)

    Over these dims the gradient of the unsharded parameter stays as it is.
    """
    return tuple(sorted(getattr(parameter, "_dp_dim_indices", ())))


def has_spmd_types(parameter: FSDPParam) -> bool:
    """Whether the parameter has SPMD types in place of placements; since 2.15. (2.15.0)"""
    return bool(getattr(parameter, "is_spmd_types", False))


def parameter_owners(parameter: FSDPParam) -> list[tuple[nn.Module, str]]:
    """The modules that hold a managed parameter, each with its own name for it; several if it is shared. (2.13.0)"""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]
