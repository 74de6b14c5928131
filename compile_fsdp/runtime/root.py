"""Data of a model's FSDP2 modules: hooks of one module, hooks that several modules share, and the root."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.states import Memory
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import FSDPState, order_gather_streams, param_groups


class ModuleHooks:
    """Pre- and post-forward hook of one module, in place of torch's two hooks, which it keeps."""

    def __init__(self, hooks: StateHooks, module: nn.Module) -> None:
        self.hooks = hooks  # shared by the modules of one `fully_shard` call
        self.module = module
        # Whether the module has still to run in the present forward of its state's modules, if they are several.
        self.is_awaited = False
        handle = hooks.state._pre_forward_hook_handle
        handles = getattr(handle, "handles", (handle, hooks.state._post_forward_hook_handle))
        ids = {each.id for each in handles}
        before, after = module._forward_pre_hooks, module._forward_hooks
        (self.pre_id,), (self.post_id,) = ids & before.keys(), ids & after.keys()
        self.eager_pre_forward: Callable[..., Any] = before[self.pre_id]
        self.eager_post_forward: Callable[..., Any] = after[self.post_id]


class StateHooks:
    """Hooks around the forward of the module, or modules, of one `fully_shard` call."""

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        # More than one if `shard_placement_fn` returns several meshes.
        self.groups = [TraceableGroup(group, state) for group in param_groups(state)]
        self.members = [ModuleHooks(self, module) for module in state._modules]
        self.root = Root(state)
        # Parameters that `fully_shard` replaced, with module and name; empty if torch's own sharded the modules.
        self.replaced: list[tuple[nn.Module, str, weakref.ref[nn.Parameter]]] = []

    @property
    def awaits_members(self) -> bool:
        """Whether any module has still to run in the present forward of several modules."""
        return any([member.is_awaited for member in self.members])

    def await_members(self, is_awaited: bool) -> None:
        """Begin or end a forward of several modules."""
        for member in self.members:
            member.is_awaited = is_awaited


class Replay(Protocol):
    """Replays the steps of a model without tracing."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Call the model; `run` calls it without replay."""

    def release(self) -> None:
        """Hold no tensors of the last steps."""


class Root:
    """One model. Each module has a separate root until a trace shows which root it is below."""

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        self.all_hooks: list[StateHooks] = []  # in the order of torch's states; empty before the first trace
        self.shared: list[StateHooks] = []  # hooks of modules that `fully_shard` got as a list; inner modules first
        self.was_called = False  # whether the model was called since `compile()`
        self.is_traced = False  # whether the running forward is compiled, at least in part
        # Whether the gather streams already wait for the work before the last forward, such as the optimizer step.
        # torch lets them wait in a forward that begins eagerly; a graph cannot.
        self.is_ordered = True
        self.awaited_backward: int | None = None  # number of the backward that drops leftover gathers at its end
        self.replay: Replay | None = None
        # A mark for each graph that has exceeded its memory budget, whereupon the ranks decide again; Dynamo would make
        # a number that changes a symbol.
        self.lowered_budgets = ""
        self.ahead: list[TraceableGroup] = []  # groups that eager code in a partly compiled forward gathered ahead
        self.had_substitute = False  # whether the last forward found a user's tensor in place of an unsharded parameter

    @at_run_time
    def adopt(self, hooks: list[StateHooks]) -> None:
        """Become the root of all modules of the model, after torch initialised their states.

        With separate roots, Dynamo's guard path to a module's root would lead through the roots of all modules before.
        """
        if self.all_hooks != hooks:
            self.all_hooks = hooks
            self.shared = [each for each in reversed(hooks) if len(each.members) > 1]
            for each in hooks:
                each.root = self

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameters, which Dynamo reads."""
        for hooks in self.all_hooks:
            for group in hooks.groups:
                group.follow_trainable()

    @at_run_time
    def order_gathers(self) -> None:
        """Order the gather streams before eager code gathers; see `is_ordered`."""
        if not self.is_ordered:
            self.is_ordered = True
            order_gather_streams(self.state)

    @at_run_time
    def drop_prefetched(self) -> None:
        """Shard the groups that eager code gathered ahead in vain, because the next forward would use their values."""
        ahead, self.ahead = self.ahead, []
        for group in ahead:
            if group.memory is Memory.UNSHARDED_AHEAD:
                group.enter(Memory.UNSHARDED)
                group.fsdp_group.reshard()
