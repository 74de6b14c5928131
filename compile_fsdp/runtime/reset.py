"""Reset of torch's own state after an interrupted step."""

from __future__ import annotations

from typing import Any

import torch

from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import FSDPState, TrainingState, param_groups


@at_run_time
def reset_iter_state(state: FSDPState) -> None:
    """Reset the state of a root, and of all modules below, to the start of a step. (2.13.0)

    torch has this function since 2.13. For earlier releases, one synchronization with the device stands for all events.

    Raises:
        RuntimeError: the state is not the root's.
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
