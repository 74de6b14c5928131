"""One backward of a parameter group, from its first hook to the delivered gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp.ops import hand_over
from compile_fsdp.runtime.attached import find_hooks, hooks_of, owner_of
from compile_fsdp.runtime.gradients import (
    describe_partial_output,
    fix_gradient_dtypes,
    free_gradient_dtypes,
    hand_back_gradient,
    take_gradient,
)
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.module_params import register_sharded, register_unsharded, sync_states
from compile_fsdp.runtime.reduction import accumulation_dtypes, reduce_gradients
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.autograd import accumulates_into, after_backward, current_backward
from compile_fsdp.torch_compat.distributed import functional_collectives, local_tensor
from compile_fsdp.torch_compat.fsdp import FSDPState, TrainingState, order_gather_streams, param_groups, reduces_unused

# Around a compiled graph


@at_run_time
def enter_graph(group: TraceableGroup, read: Sequence[torch.Tensor], cut_forward: object, may_meet_eager: bool) -> None:
    """Set how many gradients complete the group in the next compiled graph.

    Args:
        read: The unsharded parameters that the forward graph of this compiled graph computes with.
        cut_forward: None if the forward graph holds the whole forward of the group's module. Else it identifies the
            forward, and the group is complete only when all its parameters have gradients.
        may_meet_eager: Whether a gradient that autograd still expects can only come from eager code.
    """
    backward = group.backward
    backward.is_compiled = True
    backward.divisor_text = repr(group.fsdp_group.gradient_divide_factor)
    required = [param.unsharded_param for param in group.params] if cut_forward is not None else []
    is_held = cut_forward is not None and any(
        # The backward of eager code between graphs reads it, and no gradient tells when.
        not param.unsharded_param.requires_grad and param.is_saved()
        for param in group.params
    )
    backward.gradients.expect(read, required, cut_forward, is_held)
    free_gradient_dtypes(group.fsdp_group)
    forward_to_come = any(call.is_to_come() for call in group.forwards)
    backward.is_deferred = forward_to_come or (may_meet_eager and _awaits_eager_gradients(group))


@at_run_time
def _awaits_eager_gradients(group: TraceableGroup) -> bool:
    """Return whether eager code still adds gradients of the group in this backward."""
    # Eager code can use the unsharded parameters between graphs of the forward, or after it, as in a loss.
    if not (group.is_cut or group.fsdp_group.post_forward_mesh_info is None):
        return False
    backward, came = current_backward(), group.from_eager
    # Tensors that eager code finds in modules. See [Note: Leaves are plain] for the two tensors of a parameter.
    shown = (tensor for param in group.params for tensor in {param.unsharded_param, param.fsdp_param._unsharded_param})
    return any(
        tensor.requires_grad and accumulates_into(tensor) and came.get(id(tensor)) != backward for tensor in shown
    )


@at_run_time
def expect_no_gradient(leaves: Sequence[torch.Tensor]) -> None:
    """Tell the groups that the next compiled backward computes no gradient for these leaves."""
    for group, parameters in _by_group(leaves).items():
        group.backward.gradients.expect_none(parameters)


@at_run_time
def expect_gradients_again(leaves: Sequence[torch.Tensor]) -> None:
    """Let the groups of these leaves expect what they did on entering, because a different backward will run."""
    for group in _by_group(leaves):
        group.backward.gradients.expect_again()


def _by_group(leaves: Sequence[torch.Tensor]) -> dict[TraceableGroup, set[int]]:
    found: dict[TraceableGroup, set[int]] = {}
    for leaf in leaves:
        if (group := owner_of(leaf)) is not None:
            found.setdefault(group, set()).add(id(leaf))
    return found


@at_run_time
def leave_graph(group: TraceableGroup) -> None:
    """Leave the compiled graph, also after an error in it."""
    group.backward.is_compiled = False
    fix_gradient_dtypes(group.fsdp_group)


@at_run_time
def begin_eagerly(group: TraceableGroup) -> None:
    """Begin in a pre-backward hook that runs outside of graphs because the forward's frame ran in eager mode."""
    if group.backward.is_compiled:
        return
    if group.fsdp_group._training_state is TrainingState.IDLE:
        group.end_backward()  # `start_backward` does not call it if torch's own hooks began the backward
    else:
        # The rest of an earlier graph's count would make the group look gathered, although eager code freed it.
        group.backward.gradients.pending = None


# From the first hook to the reduction, in a graph


def begin(group: TraceableGroup, then_prefetch: list[TraceableGroup]) -> None:
    """Unshard before the first gradient computation that may need the group, and gather `then_prefetch` ahead."""
    if group.backward.gradients.pending:
        return  # the hook of an earlier output or of an earlier module call began this backward
    group.fsdp_group._training_state = TrainingState.PRE_BACKWARD
    group.backward.gradients.start()
    if group.fsdp_group._sharded_state is group.known.sharded:
        # The modules keep the sharded parameters, because no code reads the modules in such a backward.
        group.is_hidden = True
    if group.fsdp_group.unshard_in_backward and not group.is_unsharded:
        group.unshard()
    if group.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        group.backward.prefetch_last = then_prefetch
    else:
        _prefetch(then_prefetch)


def gradient_accumulated(owner: weakref.ref[TraceableGroup], unsharded_param: torch.Tensor) -> None:
    """Post-accumulate-grad hook of every unsharded parameter: reduce once the group is complete.

    If a parameter that the graph reads gets no gradient, torch's own final callback reduces the arrived gradients.
    """
    group = owner()
    if group is None:
        return
    backward = group.backward
    if not backward.is_compiled:
        backward.gradients.seen.add(id(unsharded_param))
        group.from_eager[id(unsharded_param)] = current_backward()
        return
    if not backward.gradients.arrive():
        return
    _prefetch(backward.prefetch_last)
    backward.prefetch_last = []
    if backward.is_deferred or not group.fsdp_group.reduce_grads:
        reshard_idle(group)
    else:
        _reshard(group)
        reduce(group)


def reshard_idle(group: TraceableGroup) -> None:
    """Reshard a group that this graph does not reduce."""
    _reshard(group)
    # IDLE, because torch's own hooks of an eager forward would otherwise take the group for unsharded.
    group.fsdp_group._training_state = TrainingState.IDLE


def _reshard(group: TraceableGroup) -> None:
    needed_again = group.backward.is_deferred and not group.fsdp_group._reshard_after_forward
    if group.fsdp_group.reshard_after_backward and not needed_again:
        group.reshard()
        if not group.is_hidden:
            register_sharded(group)
        group.is_hidden = False
    else:
        sync_states(group)


def _prefetch(groups: list[TraceableGroup]) -> None:
    for group in groups:
        if group.fsdp_group.unshard_in_backward:
            group.launch()


def reduce(group: TraceableGroup) -> None:
    """Reduce the arrived gradients."""
    # POST_BACKWARD leaves no work for torch's final callback.
    group.fsdp_group._training_state = TrainingState.POST_BACKWARD
    dtypes = accumulation_dtypes(group, group.constants.text)
    fills = reduces_unused(group.fsdp_group)
    taken = [take_gradient(param, dtype, fills) for param, dtype in zip(group.params, dtypes, strict=True)]
    arrived = [index for index, grad in enumerate(taken) if grad is not None]
    with torch.no_grad():
        reduced = reduce_gradients(group, arrived, [grad for grad in taken if grad is not None])
    if reduced is not None and _has_gradient_hooks(group):
        hand_over(reduced, group.ticket, arrived)
    else:
        group.backward.reduced, group.backward.arrived = reduced, arrived


@eval_at_trace_time_guarded
def _has_gradient_hooks(group: TraceableGroup) -> bool:
    # No guard on the hooks, because hooks that are registered later run after the graph.
    return any(each.fsdp_param.sharded_param._post_accumulate_grad_hooks for each in group.params)


@at_run_time
def deliver(group: TraceableGroup) -> None:
    """Add the reduced gradients to the gradients of the sharded parameters, after a compiled graph."""
    for param in group.params:
        hand_back_gradient(param)
    backward = group.backward
    reduced, arrived = backward.reduced, backward.arrived
    backward.reduced, backward.arrived = (), []
    if reduced is None:
        describe_partial_output(group.fsdp_group, [group.params[index].fsdp_param for index in arrived])
    else:
        group.receive(reduced, arrived)
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        for fsdp_param in group.fsdp_group.fsdp_params:
            grad = fsdp_param.sharded_param.grad
            if grad is not None and local_tensor(grad).isnan().any():
                raise RuntimeError(f"expected no nan in the gradient of {fsdp_param._param_fqn}, got some")
    if group.is_hidden and group.is_unsharded:
        register_unsharded(group)  # eager code and torch's final callback read the modules


# The backward of a whole model


@at_run_time
def start_backward(state: FSDPState) -> None:
    """Begin the backward of a whole model at its first event, and queue torch's own final callback."""
    context = state._state_ctx
    if not context.post_backward_final_callback_queued:
        for each in context.all_states:
            for group in hooks_of(each).groups:
                group.end_backward()  # the last backward may have left parameters without gradients
        state._register_root_post_backward_final_callback()
    await_end_of_backward(state)


@at_run_time
def await_end_of_backward(state: FSDPState) -> None:
    """Drop leftover gathers at the end of the running backward, eager or compiled."""
    root = hooks_of(state).root
    if root.awaited_backward != (backward := current_backward()):
        root.awaited_backward = backward
        after_backward(partial(_drop_gathered, state._state_ctx.all_states))


@at_run_time
def _drop_gathered(states: Sequence[FSDPState]) -> None:
    """Drop the gathers that the backward did not free, because the next forward would compute with their old values.

    These are gathers launched ahead for modules whose backward did not run, and of modules that eager code of a
    checkpoint reran after torch considers their backward finished.
    """
    for state in states:
        hooks = find_hooks(state)
        for group in () if hooks is None else hooks.groups:
            if group.ahead is not None and group.ahead.output is not None:
                functional_collectives.wait_tensor(group.ahead.output)
                group.drop_launched()
        for fsdp_group in param_groups(state):
            # A backward inside of another one, as of a reentrant checkpoint, leaves groups that the outer one uses.
            is_used = fsdp_group._training_state is TrainingState.PRE_BACKWARD
            if fsdp_group.is_unsharded and fsdp_group.reshard_after_backward and not is_used:
                fsdp_group.reshard()
    # If eager code gathers a module in vain, torch's callback makes only the current stream wait. The gather stream,
    # which owns the memory, could reuse it too early in a backward that follows immediately.
    order_gather_streams(states[0])
