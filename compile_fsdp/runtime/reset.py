"""Reset of a model after an interrupted step."""

from __future__ import annotations

from typing import Any

import torch

from compile_fsdp.runtime.attached import hooks_of, set_accumulated_gradient
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.module_params import register
from compile_fsdp.runtime.states import KNOWN, Memory
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import FSDPState, TrainingState, free_storage, param_groups


@at_run_time
def reset_step(state: FSDPState) -> None:
    """Reset a root, and all modules below, to the start of a step."""
    reset_iter_state(state)
    root = hooks_of(state).root
    root.is_traced = False
    root.ahead = []
    for hooks in map(hooks_of, root.state._state_ctx.all_states):
        hooks.await_members(False)
        for group in hooks.groups:
            _reset_group(group)


@at_run_time
def _reset_group(group: TraceableGroup) -> None:
    """Shard the group, and drop the gradients of the interrupted step.

    An interrupted graph changes storages but no states. An interrupted eager backward leaves gradients, to which the
    next backward would add.
    """
    group.end_backward()
    group.forwards.clear()
    if group.memory is not Memory.SHARDED:
        group.enter(Memory.SHARDED)
    for fsdp_param in group.fsdp_group.fsdp_params:
        fsdp_param.sharded_state = KNOWN.sharded
        set_accumulated_gradient(fsdp_param, None)
        if (unsharded := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            unsharded.grad = None
    for param in group.params:
        if param.post_forward is not None:
            param.post_forward.free(param.fsdp_param)
        for tensor in param.filled:
            free_storage(tensor.data)
        param.unsharded_param.grad = None
        register(param.fsdp_param, param.fsdp_param.sharded_param)


@at_run_time
def reset_iter_state(state: FSDPState) -> None:
    """Reset torch's own state of a root, and of all modules below, to the start of a step. (2.13.0)

    torch has this function since 2.13. For earlier releases, one synchronization with the device stands for all events.
    """
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
        return
    if state._is_root is False:
        raise RuntimeError("expected the root of the FSDP2 modules for reset_iter_state(), got one below it")
    if state._is_root is None:
        return  # no step has begun
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    comm: Any = state._comm_ctx
    comm.all_gather_state = None
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    context = state._state_ctx
    for each in context.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in param_groups(each):
            group.finalize_backward()
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
