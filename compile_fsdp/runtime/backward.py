"""State of one backward of a parameter group, from its first hook to the delivered gradients.

[Note: One object for each backward]
A backward may reach a group through several compiled graphs, with eager code between them. All of them share one
`GroupBackward`, which begins empty. `start_backward` replaces it when the next backward begins; an error or a reset
replaces it immediately. So no state of a backward leaks into the next backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp.ops import hand_over
from compile_fsdp.runtime.attached import find_group, hooks_of, owner_of
from compile_fsdp.runtime.gradient_count import GradientCount
from compile_fsdp.runtime.gradient_dtypes import describe_partial_output, fix_gradient_dtypes, free_gradient_dtypes
from compile_fsdp.runtime.reduction import accumulation_dtypes, reduce_gradients
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded
from compile_fsdp.torch_compat.autograd import accumulates_into, after_backward, current_backward
from compile_fsdp.torch_compat.distributed import functional_collectives, local_tensor
from compile_fsdp.torch_compat.fsdp import (
    FSDPState,
    TrainingState,
    order_gather_streams,
    param_groups,
    reduces_unused,
)

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


class ForwardCall(Protocol):
    """A forward through a compiled graph, as its backward sees it."""

    def is_to_come(self) -> bool:
        """Return whether the running backward has yet to go through this forward."""


class ForwardCalls:
    """Forwards through one group.

    Attributes:
        calls: Forwards whose backward may still run, weakly referenced.
        is_cut: Whether any compiled graph held only a part of a forward of the group's module.
        from_eager: Maps the id of an unsharded parameter to the number of the last backward in which eager code
            accumulated its gradient.
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[ForwardCall] = weakref.WeakSet()
        self.is_cut = False
        self.from_eager: dict[int, int | None] = {}

    @at_run_time
    def add(self, call: ForwardCall, is_whole: bool) -> None:
        """Record a forward; `is_whole` says whether its graph holds the module's whole forward."""
        self.calls.add(call)
        self.is_cut |= not is_whole


class GroupBackward:
    """One backward of one group.

    See [Note: One object for each backward] and [Note: Parts of a group do not know it].

    Attributes:
        is_compiled: Whether a compiled graph runs. If not, the gradient hooks only record the gradients that arrive.
        gradients: Count of the gradients of a compiled graph.
        is_deferred: Whether more gradients follow in this backward, from a forward whose backward is still to come or
            from eager code between graphs. If so, the reduction waits for them.
        prefetch_last: Groups to gather once this group's gradients are computed.
        reduced: For each parameter of `reduced_params`, (padded shard numel,), in the dtype of its gradient.
        reduced_params: Positions of the parameters whose reduced gradients wait for delivery.
        unreplicated_params: Positions of the parameters whose gradients wait for the all-reduce of a later backward.
    """

    def __init__(self) -> None:
        self.is_compiled = False
        self.gradients = GradientCount()
        self._expect: Callable[[Collection[int]], None] | None = None
        self._without: set[int] = set()
        self.is_deferred = False
        self.prefetch_last: list[TraceableGroup] = []
        self.reduced: Sequence[torch.Tensor] = ()
        self.reduced_params: list[int] = []
        self.unreplicated_params: list[int] = []

    # Around a compiled graph

    @at_run_time
    def enter_graph(
        self, group: TraceableGroup, read: Sequence[torch.Tensor], cut_forward: object, may_meet_eager: bool
    ) -> None:
        """Set how many gradients complete the group in the next compiled graph.

        Args:
            group: The group of this backward.
            read: The unsharded parameters that the forward graph of this compiled graph computes with.
            cut_forward: None if the forward graph holds the whole forward of the group's module. Else an object that
                identifies the forward of which the graph is a piece. The group is then complete, and may be freed, only
                when all its parameters have gradients. This also holds if torch reduces zeros for unused parameters.
            may_meet_eager: Whether a gradient that autograd still expects can only come from eager code. False if the
                graph's own node leads to the parameters.
        """
        self.is_compiled = True
        needs_all = cut_forward is not None or reduces_unused(group.fsdp_group)
        required = [param.unsharded_param for param in group.params] if needs_all else []
        self._expect = partial(self.gradients.expect, read, required, cut_forward)
        self._without = set()
        self._expect(self._without)
        free_gradient_dtypes(group.fsdp_group)
        forward_to_come = any(call.is_to_come() for call in group.forwards.calls)
        self.is_deferred = forward_to_come or (may_meet_eager and _awaits_eager_gradients(group))

    @at_run_time
    def expect_none(self, parameters: Collection[int]) -> None:
        """Expect no gradient for these unsharded parameters, given by id, in the entered graph."""
        assert self._expect is not None
        self._without.update(parameters)
        self._expect(self._without)

    @at_run_time
    def leave_graph(self, group: TraceableGroup) -> None:
        """Leave the compiled graph, also after an error in it."""
        self.is_compiled = False
        self._expect = None
        fix_gradient_dtypes(group.fsdp_group)

    @at_run_time
    def begin_eagerly(self, group: TraceableGroup) -> None:
        """Begin outside of a compiled graph, in a pre-backward hook.

        The hook runs there if Dynamo left the frame of the forward to eager mode.
        """
        if self.is_compiled:
            return
        if group.fsdp_group._training_state is TrainingState.IDLE:
            # First event of the group in this backward. `start_backward` skips this call if torch's own hooks began
            # the backward.
            group.end_backward()
        else:
            # Only a compiled graph counts gradients down. The rest of an earlier graph's count would make the group
            # look gathered, although an eager part of this backward freed it.
            self.gradients.pending = None

    # Begin

    def begin(self, group: TraceableGroup, then_prefetch: list[TraceableGroup]) -> None:
        """Unshard before the first gradient computation that may need the group.

        Args:
            group: The group of this backward.
            then_prefetch: Groups to gather next, before or after this group's gradients are computed.
        """
        if self.gradients.pending:
            return  # the hook of an earlier output or of an earlier module call began this backward
        group.fsdp_group._training_state = TrainingState.PRE_BACKWARD
        self.gradients.start()
        if group.fsdp_group._sharded_state is group.known.sharded:
            group.modules.keep_sharded(group)
        if group.fsdp_group.unshard_in_backward and not group.is_unsharded:
            group.unshard()
        if group.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self.prefetch_last = then_prefetch
        else:
            _prefetch(then_prefetch)

    # A gradient arrives

    def arrive(self, group: TraceableGroup) -> None:
        """Count an accumulated gradient; reduce once the group is complete.

        If a parameter that the graph reads gets no gradient, the group stays incomplete. torch's own final callback
        then reduces the arrived gradients at the end of the backward.
        """
        if not self.gradients.arrive():
            return
        _prefetch(self.prefetch_last)
        self.prefetch_last = []
        self._reshard(group)
        fsdp_group = group.fsdp_group
        if self.is_deferred or not fsdp_group.reduce_grads:
            # IDLE, because torch's own hooks of an eager forward would otherwise take the group for unsharded.
            fsdp_group._training_state = TrainingState.IDLE
        else:
            self.reduce(group)

    def end_frozen(self, group: TraceableGroup) -> None:
        """Reshard a frozen group once its module's inputs have gradients."""
        if self.is_compiled and group.is_frozen:
            self._reshard(group)
            # IDLE, because torch's own hooks of an eager forward would otherwise take the group for unsharded.
            group.fsdp_group._training_state = TrainingState.IDLE

    def _reshard(self, group: TraceableGroup) -> None:
        needed_again = self.is_deferred and not group.fsdp_group._reshard_after_forward
        if group.fsdp_group.reshard_after_backward and not needed_again:
            group.reshard()
            group.modules.register_resharded(group)
        else:
            group.modules.sync_states(group)

    # Reduce

    def reduce(self, group: TraceableGroup) -> None:
        """Reduce the arrived gradients."""
        # POST_BACKWARD leaves no work for torch's final callback.
        group.fsdp_group._training_state = TrainingState.POST_BACKWARD
        arrived: list[int] = []
        grads: list[torch.Tensor] = []
        dtypes = accumulation_dtypes(group, group.constants.text)
        for index, param in enumerate(group.params):
            grad = param.take_gradient(dtypes[index])
            if grad is not None:
                arrived.append(index)
                grads.append(grad)
        with torch.no_grad():
            reduced = reduce_gradients(group, arrived, grads)
        if reduced is None:
            self.reduced, self.reduced_params, self.unreplicated_params = (), [], arrived
        elif _has_gradient_hooks(group):
            hand_over(reduced, group.ticket, arrived)
        else:
            self.reduced, self.reduced_params, self.unreplicated_params = reduced, arrived, []

    # Deliver

    @at_run_time
    def deliver(self, group: TraceableGroup) -> None:
        """Add the reduced gradients to the gradients of the sharded parameters.

        Raises:
            RuntimeError: a gradient has a NaN in anomaly mode, as in torch's own check.
        """
        for param in group.params:
            param.hand_back_gradient()
        reduced, params = self.reduced, self.reduced_params
        self.reduced, self.reduced_params = (), []
        if self.unreplicated_params:
            unreplicated = [group.params[index].fsdp_param for index in self.unreplicated_params]
            describe_partial_output(group.fsdp_group, unreplicated)
            self.unreplicated_params = []
        group.receive(reduced, params)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            _check_nan(group)


@at_run_time
def _check_nan(group: TraceableGroup) -> None:
    for param in group.params:
        grad = param.fsdp_param.sharded_param.grad
        if grad is not None and local_tensor(grad).isnan().any():
            raise RuntimeError(f"expected no nan in the gradient of {param.fsdp_param._param_fqn}, got some")


def _prefetch(groups: list[TraceableGroup]) -> None:
    for group in groups:
        if group.fsdp_group.unshard_in_backward:
            group.launch()


@eval_at_trace_time_guarded
def _has_gradient_hooks(group: TraceableGroup) -> bool:
    # No guard on the hooks, because hooks that are registered later run after the graph.
    return any(each.fsdp_param.sharded_param._post_accumulate_grad_hooks for each in group.params)


@at_run_time
def _awaits_eager_gradients(group: TraceableGroup) -> bool:
    """Return whether eager code still adds gradients of the group in this backward.

    Eager code can use the unsharded parameters if a graph break cuts the forward, or if they stay unsharded after the
    forward. For example, a loss penalizes a weight of the root, or applies the model's head in chunks.
    """
    if not (group.forwards.is_cut or group.fsdp_group.post_forward_mesh_info is None):
        return False
    backward, came = current_backward(), group.forwards.from_eager
    # Tensors that eager code finds in modules. See [Note: Leaves are plain] for the two tensors of a parameter.
    shown = (tensor for param in group.params for tensor in {param.unsharded_param, param.fsdp_param._unsharded_param})
    return any(
        tensor.requires_grad and accumulates_into(tensor) and came.get(id(tensor)) != backward for tensor in shown
    )


def gradient_accumulated(owner: weakref.ref[TraceableGroup], unsharded_param: torch.Tensor) -> None:
    """Post-accumulate-grad hook of every unsharded parameter.

    Compiled autograd traces it where it accumulates the gradient.
    """
    group = owner()
    if group is None:
        return
    backward = group.backward
    if backward.is_compiled:
        backward.arrive(group)
    else:
        backward.gradients.seen.add(id(unsharded_param))
        group.forwards.from_eager[id(unsharded_param)] = current_backward()


@at_run_time
def expect_no_gradient(leaves: Sequence[torch.Tensor]) -> None:
    """Tell the groups of these leaves not to wait for their gradients.

    The next compiled backward computes no gradient for these leaves.
    """
    by_group: dict[TraceableGroup, set[int]] = {}
    for leaf in leaves:
        if (group := owner_of(leaf)) is not None:
            by_group.setdefault(group, set()).add(id(leaf))
    for group, parameters in by_group.items():
        group.backward.expect_none(parameters)


# The backward of a whole model


@at_run_time
def start_backward(state: FSDPState) -> None:
    """Begin the backward of a whole model at its first event.

    Queues torch's own callback if it is not queued yet. At the end of the backward, the callback reshards and reduces
    the groups that the compiled graphs left unsharded or unreduced.
    """
    context = state._state_ctx
    if not context.post_backward_final_callback_queued:
        for each in context.all_states:
            for fsdp_group in param_groups(each):
                if (group := find_group(fsdp_group)) is not None:
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
    """Drop the gathers that the backward did not free, after torch's own callback.

    These are gathers launched ahead for modules whose backward did not run, and modules that eager code of a checkpoint
    reran after their backward, which torch considers finished. The next forward would compute with the old values if
    the parameters change before it.
    """
    for state in states:
        for fsdp_group in param_groups(state):
            if (group := find_group(fsdp_group)) is not None and group.launched is not None:
                functional_collectives.wait_tensor(group.launched.output)
                group.launched = None
            if fsdp_group.is_unsharded and fsdp_group.reshard_after_backward:
                fsdp_group.reshard()
    # If eager code gathers a module in vain, torch's callback makes only the current stream wait. The gather stream,
    # which owns the memory, could reuse it too early in a backward that follows immediately.
    order_gather_streams(states[0])
