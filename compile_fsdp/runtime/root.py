"""What only the root of a model's FSDP2 modules has."""

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
    """Runs the steps of a model again without tracing."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Call the model; `run` does it as if there was no replay."""


class Root:
    """One model. Each module has a root of its own until a trace shows which one it is below.

    Attributes:
        state: The root's FSDP2 state.
        all_hooks: The hooks of all FSDP2 modules, in the order of torch's states; empty before the first trace.
        shared: Those that several modules share, since `fully_shard` was given a list; inner ones first.
        was_called: Whether the model has been called since `compile()`.
        is_traced: Whether the forward that runs is compiled, at least in part.
        is_ordered: Whether eager gathers come behind what was done before the forward that has begun last, such as the
            optimizer's step: torch sees to it in a forward that begins eagerly, a graph cannot.
        awaited_backward: At the end of which backward what it has left gathered is dropped; None before the first.
        replay: Runs the model's steps again without tracing; None if nothing does.
        ahead: Groups that eager code of such a forward has gathered ahead.
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
        """Become the root of all modules of the model, whose states torch has initialised.

        They share one root, and one list of hooks: Dynamo would come to a module's own by way of those of all modules
        before.
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
        """Let unsharded parameters need a gradient as the sharded ones do, for Dynamo to see."""
        for group in self._groups():
            group.follow_trainable()

    @at_run_time
    def order_gathers(self) -> None:
        """Before eager code gathers: see `is_ordered`."""
        if not self.is_ordered:
            self.is_ordered = True
            order_gather_streams(self.state)

    @at_run_time
    def drop_prefetched(self) -> None:
        """Shard what eager code has gathered ahead for modules that did not run.

        Their parameters may change until the next forward, which would compute with the old values, and shard these.
        """
        ahead, self.ahead = self.ahead, []
        for group in ahead:
            if group.is_ahead:
                group.is_ahead = False
                group.fsdp_group.reshard()

    @at_run_time
    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self.is_traced = False
        self.ahead = []
        for state in self.state._state_ctx.all_states:
            hooks_of(state).reset()
