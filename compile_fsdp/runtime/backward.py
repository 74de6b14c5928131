"""What one backward of a parameter group needs, from its first hook to the gradients it delivers.

[Note: One object for each backward]
A backward may reach a group through several compiled graphs, and through eager code between them. What these have to
know of each other stands in one `GroupBackward`, which begins empty. `start_backward` puts a new one in its place when
the next backward begins, and an error or a reset does so at once. So nothing of one backward is left to the next.
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
    """A forward through a compiled graph, as far as its backward is concerned."""

    def is_to_come(self) -> bool:
        """Whether the backward that runs now will reach it."""


class ForwardCalls:
    """The forwards through one group.

    Attributes:
        calls: Those whose backward may still come.
        is_cut: Whether a compiled graph has ever held but a part of a forward of the group's module.
        from_eager: By id of an unsharded parameter, the last backward in which eager code accumulated its gradient.
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[ForwardCall] = weakref.WeakSet()
        self.is_cut = False
        self.from_eager: dict[int, int | None] = {}

    @at_run_time
    def add(self, call: ForwardCall, is_whole: bool) -> None:
        """A forward runs through a graph that holds all of the module's forward, or a part."""
        self.calls.add(call)
        self.is_cut |= not is_whole


class GroupBackward:
    """One backward of one group.

    See [Note: One object for each backward] and [Note: Parts of a group do not know it].

    Attributes:
        is_compiled: Whether a compiled graph runs; the gradient hooks only take note of what arrives otherwise.
        gradients: Counts the gradients of a compiled graph.
        is_deferred: More gradients follow in this backward, of another forward or of eager code between graphs, and
            these are reduced with them.
        prefetch_last: What to gather once this group's gradients are computed.
        reduced: By parameter of `reduced_params`, (padded shard numel,), in the parameters' dtype.
        reduced_params: Positions of the parameters whose gradients wait to be delivered.
        unreplicated_params: Positions of those whose gradients await a later backward's all-reduce.
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
        """Settle how many gradients complete the group in the compiled graph that runs next.

        Args:
            group: The group of this backward.
            read: The unsharded parameters that its forward graph computes with.
            cut_forward: None if that graph holds the whole forward of the group's module. Else which forward it is a
                piece of: the group is complete, and may be freed, only when all its parameters have their gradients. So
                it is where torch reduces zeros for those that are not used.
            may_meet_eager: Whether autograd expects gradients of the parameters from eager code alone. False if the
                graph's own node leads to them.
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
        """Unsharded parameters, by id, get no gradient in the compiled graph that has been entered."""
        assert self._expect is not None
        self._without.update(parameters)
        self._expect(self._without)

    @at_run_time
    def leave_graph(self, group: TraceableGroup) -> None:
        """The compiled graph is over, or has failed."""
        self.is_compiled = False
        self._expect = None
        fix_gradient_dtypes(group.fsdp_group)

    @at_run_time
    def begin_eagerly(self, group: TraceableGroup) -> None:
        """A pre-backward hook runs outside of a compiled graph, since its forward's frame fell back to eager."""
        if self.is_compiled:
            return
        if group.fsdp_group._training_state is TrainingState.IDLE:
            # Nothing of the group has run in this backward, and torch's own hooks may have begun that one.
            group.end_backward()
        else:
            # Only a compiled graph counts gradients down: whatever an earlier one has left would look as if the group
            # were gathered, while an eager part of this backward has freed it.
            self.gradients.pending = None

    # Begin

    def begin(self, group: TraceableGroup, then_prefetch: list[TraceableGroup]) -> None:
        """Unshard before the first gradient computation that may need the group.

        Args:
            group: The group of this backward.
            then_prefetch: Groups to gather next, before this group's gradients are computed or after.
        """
        if self.gradients.pending:
            return  # another output, or another use of the module, came first
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
        """Count a gradient that has just been accumulated; reduce once the group is complete.

        Parameters that are read and get no gradient leave the group incomplete: torch's own final callback then
        reduces what has arrived, at the end of the backward.
        """
        if not self.gradients.arrive():
            return
        _prefetch(self.prefetch_last)
        self.prefetch_last = []
        self._reshard(group)
        fsdp_group = group.fsdp_group
        if self.is_deferred or not fsdp_group.reduce_grads:
            # Or torch's own hooks, if another forward of the group ran eagerly, would take the group for unsharded.
            fsdp_group._training_state = TrainingState.IDLE
        else:
            self.reduce(group)

    def end_frozen(self, group: TraceableGroup) -> None:
        """Reshard a frozen group once the gradients of its module's inputs are there."""
        if self.is_compiled and group.is_frozen:
            self._reshard(group)
            # Or torch's own hooks, of an earlier forward that ran eagerly, would take the group for unsharded.
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
        """Reduce the gradients that have arrived."""
        # Nothing is left to do for torch's final callback.
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
        """Hand the reduced gradients to the sharded parameters, adding to what is there.

        Raises:
            RuntimeError: in anomaly mode, one is NaN, as torch's own check raises.
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
    # Not guarded: hooks that come later run after the graph.
    return any(each.fsdp_param.sharded_param._post_accumulate_grad_hooks for each in group.params)


@at_run_time
def _awaits_eager_gradients(group: TraceableGroup) -> bool:
    """Whether eager code has gradients of the group still to come in this backward.

    Eager code can use the unsharded parameters of a forward that a graph break cut, and those that stay unsharded after
    the forward: a loss may penalize a weight of the root, or apply the model's head in chunks.
    """
    if not (group.forwards.is_cut or group.fsdp_group.post_forward_mesh_info is None):
        return False
    backward, came = current_backward(), group.forwards.from_eager
    # What modules show to eager code; see [Note: Leaves are plain] for the two tensors of a parameter.
    shown = (tensor for param in group.params for tensor in {param.unsharded_param, param.fsdp_param._unsharded_param})
    return any(
        tensor.requires_grad and accumulates_into(tensor) and came.get(id(tensor)) != backward for tensor in shown
    )


def gradient_accumulated(owner: weakref.ref[TraceableGroup], unsharded_param: torch.Tensor) -> None:
    """The hook on every unsharded parameter, traced where compiled autograd accumulates the gradient."""
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
    """Before a compiled backward runs: these leaves get no gradient from it, and no group is to wait for one."""
    by_group: dict[TraceableGroup, set[int]] = {}
    for leaf in leaves:
        if (group := owner_of(leaf)) is not None:
            by_group.setdefault(group, set()).add(id(leaf))
    for group, parameters in by_group.items():
        group.backward.expect_none(parameters)


# The backward of a whole model


@at_run_time
def start_backward(state: FSDPState) -> None:
    """Begin the backward of a whole model, once, at the first thing of it that runs.

    torch's own callback, queued here, reshards and reduces at the end of the backward whatever the compiled
    graphs have left.
    """
    context = state._state_ctx
    if not context.post_backward_final_callback_queued:
        for each in context.all_states:
            for fsdp_group in param_groups(each):
                if (group := find_group(fsdp_group)) is not None:
                    group.end_backward()  # of the last one, which may have left parameters without gradients
        state._register_root_post_backward_final_callback()
    await_end_of_backward(state)


@at_run_time
def await_end_of_backward(state: FSDPState) -> None:
    """Inside a backward, eager or compiled: drop at its end what it has gathered and not freed."""
    root = hooks_of(state).root
    if root.awaited_backward != (backward := current_backward()):
        root.awaited_backward = backward
        after_backward(partial(_drop_gathered, state._state_ctx.all_states))


@at_run_time
def _drop_gathered(states: Sequence[FSDPState]) -> None:
    """Drop what the backward has gathered and not freed, behind torch's own callback.

    Gathers sent ahead for modules whose backward did not come, and modules that eager code of a checkpoint ran again
    behind their backward: torch takes that for over. Parameters may change until the next forward, which would compute
    with the old values.
    """
    for state in states:
        for fsdp_group in param_groups(state):
            if (group := find_group(fsdp_group)) is not None and group.launched is not None:
                functional_collectives.wait_tensor(group.launched.output)
                group.launched = None
            if fsdp_group.is_unsharded and fsdp_group.reshard_after_backward:
                fsdp_group.reshard()
    # For a module that eager code has gathered in vain torch's callback has waited with the current stream alone. The
    # stream that the memory belongs to would use it again in a backward that follows at once.
    order_gather_streams(states[0])
