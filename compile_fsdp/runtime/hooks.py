"""Forward hooks of sharded modules: torch's own in eager mode, traced counterparts under Dynamo.

[Note: Where the root is traced]
torch.compile starts tracing below `Module.__call__`, so that a compiled module's own hooks would become separate
graphs. `TraceableModule._call_impl` is the frame that is compiled instead. Dynamo then inlines the root's hooks and
forward into one graph, as it inlines the hooks and forwards of the modules below.

[Note: Code of its own for every module]
Dynamo counts compilations by code object, and stops at the recompile limit, 8 by default. If roots shared the code
object of `_call_impl`, Dynamo could not compile the ninth model. Behind a graph break, Dynamo also compiles each
module's hooks as separate frames, so each hook has a separate code object, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from compile_fsdp.runtime import checks, trace_record
from compile_fsdp.runtime.attached import hooks_of, module_hooks_of, set_hooks, set_module_hooks
from compile_fsdp.runtime.backward import await_end_of_backward, start_backward
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.outputs import cast_floating, find_tensors
from compile_fsdp.runtime.parameter_checks import check_parameters
from compile_fsdp.runtime.root import Root
from compile_fsdp.runtime.stale_optimizers import warn_of_stale_optimizers
from compile_fsdp.runtime.subclass_parameters import is_extended
from compile_fsdp.runtime.tracing import (
    at_run_time,
    defer_hook_bodies,
    eval_at_trace_time_guarded,
    is_deep_in_regions,
    restore_hook_bodies,
)
from compile_fsdp.torch_compat.autograd import current_backward
from compile_fsdp.torch_compat.dispatch import tree_map_only
from compile_fsdp.torch_compat.dynamo import call_with_side_effects, compiles_frames, passing_dynamo, skip_code
from compile_fsdp.torch_compat.fsdp import FSDPState, param_groups


class StateHooks:
    """Hooks around the forward of the module, or modules, of one `fully_shard` call.

    Attributes:
        state: torch's state of the module or modules.
        groups: The state's parameter groups; more than one if `shard_placement_fn` returns several meshes.
        members: Hooks of each module.
        root: Data of the root that the modules belong to.
    """

    def __init__(self, state: FSDPState) -> None:
        self.state = state
        set_hooks(state, self)
        self.groups = [TraceableGroup(group, state) for group in param_groups(state)]
        self.members = [ModuleHooks(self, module) for module in state._modules]
        self.root = Root(state)

    @property
    def module(self) -> nn.Module:
        return self.state._modules[0]

    def before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters and cast the inputs."""
        context = self.state._state_ctx
        if context.iter_forward_root is None:
            context.iter_forward_root = self.state
            self.root.is_traced = True
            self.root.is_ordered = False
            # For the whole forward, because the user's hooks must be traced with the backward, too. Otherwise Dynamo
            # would trace a tensor's hook immediately, and forget the earlier effects of our hooks.
            defer_hook_bodies()
            if self.state._device.type != "cpu":  # eager FSDP2, too, moves the root's inputs
                device = self.state._device
                args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        is_first = True
        if len(self.members) > 1:
            is_first = not any([member.is_awaited for member in self.members])
            if is_first:
                for member in self.members:
                    member.is_awaited = True
        policy = self.state._mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        for group in self.groups:
            reason = checks.unsupported_setting(group.fsdp_group)
            if reason is not None:
                checks.refuse(self, reason)
            if not group.is_unsharded:
                group.modules.save(group)
                group.unshard()
            elif group.is_ahead:
                group.is_ahead = False
            group.modules.register_unsharded(group)
        if torch.is_grad_enabled() and any([group.is_frozen for group in self.groups]):
            self._watch_inputs((args, kwargs))
        ahead = self.state._states_to_forward_prefetch
        if is_first and ahead and not is_deep_in_regions():  # in nested regions only the passes prefetch
            for state in ahead:
                for group in hooks_of(state).groups:
                    group.launch()
        return args, kwargs

    def after_forward(self, output: Any) -> Any:
        """Free the parameters and watch for the backward."""
        output = self.complete(output)
        context = self.state._state_ctx
        if context.iter_forward_root is self.state:
            for hooks in self.root.shared:
                if any([member.is_awaited for member in hooks.members]):
                    # The forward ran only some modules of the state.
                    output = hooks.complete(output)
            if _prefetches(self):
                for hooks in self.root.all_hooks:
                    for group in hooks.groups:
                        group.launched = None  # the module was prefetched but did not run
            context.iter_forward_root = None
            self.root.is_traced = False
            restore_hook_bodies()
        return output

    def complete(self, output: Any) -> Any:
        if len(self.members) > 1:
            for member in self.members:
                member.is_awaited = False
        for group in self.groups:
            group.reshard_after_forward()
        watched = self._watched_outputs(output)
        previous, is_whole = _leave(self, len(watched) > 0)
        for tensor in watched:
            defer_hook_bodies()
            tensor.register_hook(partial(_pre_backward, self, previous, is_whole))
            restore_hook_bodies()
        return self.cast_output(output)

    def cast_output(self, output: Any) -> Any:
        dtype = self.state._mp_policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    @at_run_time
    def reset(self) -> None:
        """Discard the state of an interrupted step."""
        for member in self.members:
            member.is_awaited = False
        for group in self.groups:
            group.reset()

    @at_run_time
    def wait_for_prefetched(self, meets_graphs: bool) -> None:
        """Complete the eager prefetches of this module in a partly compiled forward.

        A graph cannot wait for the prefetch of a module that runs eagerly.

        Args:
            meets_graphs: Whether Dynamo compiles the next frames, although the root may run eagerly.
        """
        for group in self.groups:
            group.is_ahead = False
        root_state = self.state._state_ctx.iter_forward_root
        if root_state is None or not ((root := hooks_of(root_state).root).is_traced or meets_graphs):
            return
        for state in self.state._states_to_forward_prefetch:
            for group in hooks_of(state).groups:
                if not group.is_unsharded:
                    group.fsdp_group.wait_for_unshard()
                    group.is_ahead = True
                    root.ahead.append(group)

    def _watch_inputs(self, inputs: Any) -> None:
        # Frozen parameters get no gradient, so the inputs' gradients mark the end of their backward.
        tensors: list[torch.Tensor] = []
        find_tensors(inputs, tensors, [])
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                defer_hook_bodies()
                tensor.register_hook(partial(_after_backward, self))
                restore_hook_bodies()

    def next_in_backward(self, previous: int, group: TraceableGroup) -> list[TraceableGroup]:
        """Return the groups that `group` gathers ahead in the backward.

        These are the groups of the user's prefetch list, or else of module `previous` in `Root.all_hooks`: the last
        module with a backward whose forward ended before this module's forward.
        """
        if group is not self.groups[-1]:
            return []
        states = self.state._states_to_backward_prefetch
        if states:
            ahead = [hooks_of(state) for state in states]
        elif group.backward_prefetch is not None and previous >= 0:
            ahead = [self.root.all_hooks[previous]]
        else:
            return []
        return [each for hooks in ahead for each in reversed(hooks.groups)]

    def _watched_outputs(self, output: Any) -> list[torch.Tensor]:
        """Return the output tensors whose gradients start the module's backward."""
        tensors: list[torch.Tensor] = []
        unknown: list[str] = []
        if not torch.is_grad_enabled() or not self.groups:
            return tensors
        find_tensors(output, tensors, unknown)
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if unknown and not tensors:
            # An object of unknown type, such as a key-value cache, is harmless beside these tensors.
            checks.refuse_output(self, tuple(unknown))
        return tensors


class ModuleHooks:
    """Pre- and post-forward hook of one module, in place of torch's two hooks.

    Attributes:
        hooks: Hooks that the modules of one `fully_shard` call share.
        module: The module.
        is_awaited: Whether the module has still to run in the present forward of its state's modules; always False
            if the state has a single module.
        eager_pre_forward: torch's own pre-forward hook.
        eager_post_forward: torch's own post-forward hook.
    """

    def __init__(self, hooks: StateHooks, module: nn.Module) -> None:
        self.hooks = hooks
        self.module = module
        self.is_awaited = False
        self.eager_pre_forward: Callable[..., Any] | None = None
        self.eager_post_forward: Callable[..., Any] | None = None

    @at_run_time
    def install(self) -> None:
        """Replace torch's hooks in place, to keep their order among the user's hooks."""
        handle = self.hooks.state._pre_forward_hook_handle
        handles = getattr(handle, "handles", (handle, self.hooks.state._post_forward_hook_handle))
        ids = {each.id for each in handles}
        before, after = self.module._forward_pre_hooks, self.module._forward_hooks
        (pre_id,), (post_id,) = ids & before.keys(), ids & after.keys()
        self.eager_pre_forward, self.eager_post_forward = before[pre_id], after[post_id]
        before[pre_id], after[post_id] = with_own_code(_pre_forward), with_own_code(_post_forward)
        params = (param for group in self.hooks.groups for param in group.params)
        if any(is_extended(param.fsdp_param) for param in params):
            # Keep Dynamo from compiling these frames behind a graph break, because a graph that returns a tensor
            # subclass to the modules would get a plain gradient for the subclass.
            skip_code(before[pre_id].__code__)
            skip_code(after[post_id].__code__)
        settle_hook_order(self.module)  # torch moved its hooks to the front, and a caller may be compiled
        set_module_hooks(self.module, self)

    def after_forward(self, output: Any) -> Any:
        """Run the module's post-forward hook; the last of several modules ends the forward."""
        if len(self.hooks.members) == 1:
            return self.hooks.after_forward(output)
        if self.is_awaited:
            self.is_awaited = False
            # If the module is called without the root, no later hook ends this forward.
            is_alone = self.hooks.state._state_ctx.iter_forward_root is self.hooks.state
            if is_alone or not any([member.is_awaited for member in self.hooks.members]):
                return self.hooks.after_forward(output)
        return self.hooks.cast_output(output)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would compile the frames that it calls.
def settle_hook_order(model: nn.Module) -> None:
    """Reinsert all modules' forward hooks in the order in which they run. (2.11.0)

    Dynamo before 2.12 looks a hook up by its position of registration. If `prepend=True` moved the hook, Dynamo finds
    the wrong hook there.
    """
    if torch.__version__ >= "2.12":
        return
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            in_order = list(hooks.items())
            hooks.clear()
            hooks.update(in_order)


# The hooks take their object from the module, because Dynamo guards each object along the path that leads to it, and
# the guard path through the hook would be long.


def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    member = module_hooks_of(module)
    if torch.compiler.is_dynamo_compiling():
        _enter(member.hooks)
        return call_with_side_effects(member.hooks.before_forward, args, kwargs)
    assert member.eager_pre_forward is not None
    member.hooks.root.order_gathers()
    inputs = member.eager_pre_forward(module, args, kwargs)
    member.hooks.wait_for_prefetched(compiles_frames())
    if current_backward() is not None:
        # A checkpoint reruns the module. If the module is frozen and reruns after torch considers its backward
        # finished, torch leaves it unsharded, and a change of its parameters would be lost.
        await_end_of_backward(member.hooks.state)
    return inputs


def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    member = module_hooks_of(module)
    if torch.compiler.is_dynamo_compiling():
        return call_with_side_effects(member.after_forward, output)
    assert member.eager_post_forward is not None
    return member.eager_post_forward(module, args, output)


@at_run_time
def with_own_code(function: Any) -> Any:
    """Copy a function with its code object. See [Note: Code of its own for every module]."""
    # A new name, because Dynamo's tables would not tell equal code objects apart.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    # Copied globals, because Dynamo stores results of our functions there and never removes them.
    return FunctionType(code, dict(function.__globals__), function.__name__, closure=function.__closure__)


_copies = itertools.count()


def _pre_backward(hooks: StateHooks, previous: int, is_whole: bool, grad: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_dynamo_compiling():
        hooks.root.order_gathers()
        start_backward(hooks.state)
        for group in hooks.groups:
            group.backward.begin_eagerly(group)
    for group in hooks.groups:
        group.backward.begin(group, hooks.next_in_backward(previous, group))
        if not is_whole:
            # A checkpoint may rerun the forward as eager code, which reads the modules' parameters.
            group.modules.register_unsharded(group)
    return grad


def _after_backward(hooks: StateHooks, grad: torch.Tensor) -> torch.Tensor:
    for group in hooks.groups:
        group.backward.end_frozen(group)
    return grad


# Functions that Dynamo calls while it traces.


@eval_at_trace_time_guarded
def _enter(hooks: StateHooks) -> None:
    """Initialise the FSDP2 state and refuse unsupported models, before the graph gets any op."""
    _initialise(hooks)
    _prepare_groups((hooks, *map(hooks_of, hooks.state._states_to_forward_prefetch)))
    trace_record.enter(hooks)


@at_run_time
def _initialise(hooks: StateHooks) -> None:
    state = hooks.state
    if state._is_root is not False:
        check_parameters(hooks.module, state)
        warn_of_stale_optimizers(hooks.module)
    try:
        state._lazy_init()
    except (RuntimeError, ValueError) as error:
        raise passing_dynamo(error) from None
    root_state = next(each for each in state._state_ctx.all_states if each._is_root)  # the root may run eagerly
    hooks_of(root_state).root.adopt()


@at_run_time
def _prepare_groups(modules: Iterable[StateHooks]) -> None:
    for hooks in modules:
        for group in hooks.groups:
            checks.check_group(group.fsdp_group)
            group.prepare()


@at_run_time
def prepare_model(root: StateHooks) -> frozenset[str]:
    """Prepare a model as its first trace does; returns the names of the process groups that gather parameters."""
    _initialise(root)
    _prepare_groups(root.root.all_hooks)
    groups = (group for hooks in root.root.all_hooks for group in hooks.groups)
    return frozenset(filter(None, (group.constants.gather_group for group in groups)))


@eval_at_trace_time_guarded
def _prefetches(hooks: StateHooks) -> bool:
    """Return whether any module of the model prefetches in the forward; each module guards its own list."""
    return any(state._states_to_forward_prefetch for state in hooks.state._state_ctx.all_states)


@eval_at_trace_time_guarded
def _leave(hooks: StateHooks, has_backward: bool) -> tuple[int, bool]:
    """Return the module that ended its forward before, and whether this forward began in this trace.

    The module is a position in `Root.all_hooks`, -1 for none: Dynamo would keep an object alive with its guards.
    """
    previous, is_whole = trace_record.leave(hooks, has_backward)
    all_hooks = hooks.root.all_hooks
    index = -1 if previous is None or previous not in all_hooks else all_hooks.index(previous)
    return index, is_whole
