"""Data that only the root of a model's FSDP2 modules has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from compile_fsdp.runtime.attached import hooks_of
from compile_fsdp.runtime.tracing import at_run_time, inline_only
from compile_fsdp.torch_compat.fsdp import FSDPState, order_gather_streams

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup
    from compile_fsdp.runtime.hooks import StateHooks


class Replay(Protocol):
    """Replays the steps of a model without tracing."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Call the model; `run` calls it without replay."""


class Root:
    """One model. Each module has a separate root until a trace shows which root it is below.

    Attributes:
        state: The root's FSDP2 state.
        all_hooks: Hooks of all FSDP2 modules, in the order of torch's states; empty before the first trace.
        shared: Hooks that several modules share because `fully_shard` got a list; inner modules first.
        was_called: Whether the model was called since `compile()`.
        is_traced: Whether the running forward is compiled, at least in part.
        is_ordered: Whether the gather streams already wait for the work before the last forward, such as the optimizer
            step. torch lets them wait in a forward that begins eagerly; a graph cannot.
        awaited_backward: Number of the backward that drops leftover gathers at its end; None before the first.
        replay: Replays the model's steps without tracing; None without replay.
        ahead: Groups that eager code in a partly compiled forward gathered ahead.
    """

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        self.all_hooks: list[StateHooks] = []
        self.shared: list[StateHooks] = []
        self.was_called = False
        self.is_traced = False
        self.is_ordered = True
        self.awaited_backward: int | None = None
        self.replay: Replay | None = None
        self.ahead: list[TraceableGroup] = []

    @at_run_time
    def adopt(self) -> None:
        """Become the root of all modules of the model, after torch initialised their states.

        The modules share one root and one list of hooks. With separate roots, Dynamo's guard path to a module's root
        would lead through the roots of all modules before it.
        """
        hooks = [hooks_of(state) for state in self.state._state_ctx.all_states]
        if self.all_hooks != hooks:
            self.all_hooks = hooks
            self.shared = [each for each in reversed(hooks) if len(each.members) > 1]
            for each in hooks:
                each.root = self

    @inline_only
    def _groups(self) -> Iterator[TraceableGroup]:
        for state in self.state._state_ctx.all_states:
            yield from hooks_of(state).groups

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameters, which Dynamo reads.

        Not of an unsharded group, because its modules show the unsharded parameters, and the user has set those.
        """
        for group in self._groups():
            if not group.is_unsharded:
                group.follow_trainable()

    @at_run_time
    def order_gathers(self) -> None:
        """Order the gather streams before eager code gathers; see `is_ordered`."""
        if not self.is_ordered:
            self.is_ordered = True
            order_gather_streams(self.state)

    @at_run_time
    def drop_prefetched(self) -> None:
        """Shard the groups that eager code gathered ahead for modules that did not run.

        Otherwise the next forward would compute with, and shard, the old values of parameters that change before it.
        """
        ahead, self.ahead = self.ahead, []
        for group in ahead:
            if group.is_ahead:
                group.is_ahead = False
                group.fsdp_group.reshard()

    @at_run_time
    def reset(self) -> None:
        """Discard the state of an interrupted step."""
        self.is_traced = False
        self.ahead = []
        for state in self.state._state_ctx.all_states:
            hooks_of(state).reset()
