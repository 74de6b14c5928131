"""Setup of a model at trace time: torch's lazy initialisation, checks, and constants of the groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from compile_fsdp.errors import NotShardedError
from compile_fsdp.runtime.attached import find_hooks, hooks_of, set_owner
from compile_fsdp.runtime.backward import gradient_accumulated
from compile_fsdp.runtime.checks import check_group, check_parameters, describe
from compile_fsdp.runtime.group import GroupConstants, TraceableGroup
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.reduction import process_groups
from compile_fsdp.runtime.root import StateHooks
from compile_fsdp.runtime.stale_optimizers import warn_of_stale_optimizers
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.distributed import name_in_graphs
from compile_fsdp.torch_compat.dynamo import passing_dynamo
from compile_fsdp.torch_compat.fsdp import FSDPMeshInfo


@at_run_time
def initialise(hooks: StateHooks) -> None:
    """Initialise torch's states of the model, and find their root."""
    state = hooks.state
    if state._is_root is not False:
        check_parameters(state)
        warn_of_stale_optimizers(state._modules[0])
    try:
        state._lazy_init()
    except (RuntimeError, ValueError) as error:
        raise passing_dynamo(error) from None
    states = state._state_ctx.all_states
    if names := ", ".join(describe(each) for each in states if find_hooks(each) is None):
        raise NotShardedError(
            f"expected traceable modules only, got {names}, sharded with torch's own fully_shard(); call "
            "compile_fsdp.make_traceable() with the whole model"
        )
    root_state = next(each for each in states if each._is_root)  # the root may run eagerly
    hooks_of(root_state).root.adopt([hooks_of(each) for each in states])


@at_run_time
def prepare_groups(modules: Iterable[StateHooks]) -> None:
    """Check the groups of these modules, and prepare them for a trace."""
    for hooks in modules:
        for group in hooks.groups:
            check_group(group.fsdp_group)
            if not group.params:
                _create(group)
            group.follow_trainable()
            for param in group.params:
                # A weak reference, because the garbage collector does not see hooks that a tensor holds in C++.
                param.refresh(partial(gradient_accumulated, weakref.ref(group)))


@at_run_time
def _create(group: TraceableGroup) -> None:
    """Create the empty unsharded parameters, and the constants that tracing needs."""
    fsdp_group = group.fsdp_group
    shard_count, gather_group, post_forward_count, post_forward_group = 1, "", 1, ""
    if isinstance(fsdp_group.mesh_info, FSDPMeshInfo):
        process_group = fsdp_group.mesh_info.shard_process_group
        shard_count, gather_group = process_group.size(), name_in_graphs(process_group)
    for each in filter(None, process_groups(fsdp_group)):
        name_in_graphs(each)  # here, so that names do not depend on the order of tracing
    smaller = fsdp_group.post_forward_mesh_info if fsdp_group._use_post_forward_mesh else None
    if smaller is not None:
        process_group = smaller.shard_process_group
        post_forward_count, post_forward_group = process_group.size(), name_in_graphs(process_group)
    # Without this, parameters created under inference_mode would be inference tensors, which cannot be trained.
    with torch.inference_mode(False), torch.no_grad():
        sizes = shard_count, None if smaller is None else post_forward_count
        params = [TraceableParam(each, *sizes, fsdp_group.device) for each in fsdp_group.fsdp_params]
        if smaller is not None:
            group.post_forward_rank = torch.tensor([smaller.shard_mesh_rank], device=fsdp_group.device)
    for param in params:
        for tensor in (param.unsharded_param, *param.filled):
            set_owner(tensor, group)
    routes = shard_count, gather_group, post_forward_count, post_forward_group
    group.constants = GroupConstants(
        *routes,
        is_extended=any(param.extension is not None for param in params),
        is_tied=any(param._module_info.shared_modules for param in fsdp_group.fsdp_params),
        text=repr((routes, [(param.layout, param.storage_bytes) for param in params])),
    )
    group.params = params
