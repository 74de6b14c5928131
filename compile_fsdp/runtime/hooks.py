"""Forward hooks of sharded modules: torch's own in eager mode, traced counterparts under Dynamo.

[Note: Where the root is traced]
torch.compile starts tracing below `Module.__call__`, so that a compiled module's own hooks would become separate
graphs. `TraceableModule._call_impl` is the frame that is compiled instead. Dynamo inlines the root's hooks and forward
into it, as it inlines the hooks and forwards of the modules below.

[Note: Inputs of a module]
Eager FSDP2 passes the inputs of a sharded module that need a gradient through an autograd function. So the gradients of
the readers in the module are added before those of other readers, such as a skip connection, and the module's own hooks
on such a tensor see their sum alone. A traced module reads aliases of its inputs to the same effect;
`drop_input_aliases` removes those that make no difference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from compile_fsdp.runtime import checks, trace_record
from compile_fsdp.runtime.attached import find_hooks, hooks_of, module_hooks_of
from compile_fsdp.runtime.backward import await_end_of_backward, begin, begin_eagerly, reshard_idle, start_backward
from compile_fsdp.runtime.gather import EAGER_GATHER
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.module_params import register_unsharded, reshard_after_forward, save
from compile_fsdp.runtime.outputs import alias_inputs, cast_floating, find_tensors, move_tensors
from compile_fsdp.runtime.prepare import initialise, prepare_groups
from compile_fsdp.runtime.root import ModuleHooks, StateHooks
from compile_fsdp.runtime.states import Memory
from compile_fsdp.runtime.tracing import (
    at_run_time,
    defer_hook_bodies,
    eval_at_trace_time_guarded,
    is_deep_in_regions,
    keep_later_writes,
    restore_hook_bodies,
)
from compile_fsdp.torch_compat.autograd import current_backward
from compile_fsdp.torch_compat.distributed import name_in_graphs
from compile_fsdp.torch_compat.dynamo import call_with_side_effects, compiles_frames

# The hooks take their object from the module, because Dynamo guards each object along the path that leads to it, and
# the guard path through the hook would be long.


def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    member = module_hooks_of(module)
    if torch.compiler.is_dynamo_compiling():
        _enter(member.hooks)
        return call_with_side_effects(before_forward, member.hooks, args, kwargs)
    member.hooks.root.order_gathers()
    inputs = member.eager_pre_forward(module, args, kwargs)
    _wait_for_prefetched(member.hooks, compiles_frames())
    if current_backward() is not None:
        # A checkpoint reruns the module. If the module is frozen and reruns after torch considers its backward
        # finished, torch leaves it unsharded, and a change of its parameters would be lost.
        await_end_of_backward(member.hooks.state)
    return inputs


def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    member = module_hooks_of(module)
    if torch.compiler.is_dynamo_compiling():
        keep_later_writes()
        return call_with_side_effects(_after_module, member, output)
    return member.eager_post_forward(module, args, output)


def before_forward(hooks: StateHooks, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather the parameters and cast the inputs."""
    state = hooks.state
    if state._state_ctx.iter_forward_root is None:
        args, kwargs = _begin_root(hooks, args, kwargs)
    is_first = len(hooks.members) == 1 or not hooks.awaits_members
    if len(hooks.members) > 1 and is_first:
        hooks.await_members(True)
    policy = state._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    for group in hooks.groups:
        if group.fsdp_group._all_gather_result is not None:
            checks.refuse_pending_unshard(state)
        if not group.is_unsharded:
            save(group)
            group.unshard()
        else:
            if group.memory is Memory.UNSHARDED_AHEAD:
                group.enter(Memory.UNSHARDED)
            _refuse_substitutes(group)
        register_unsharded(group)
    if torch.is_grad_enabled() and hooks.groups:
        args, kwargs = alias_inputs((args, kwargs))  # see [Note: Inputs of a module]
        if any([group.is_frozen for group in hooks.groups]):
            _watch_inputs(hooks, (args, kwargs))
    ahead = state._states_to_forward_prefetch
    if is_first and ahead and not is_deep_in_regions():  # in nested regions only the passes prefetch
        for each in ahead:
            for group in hooks_of(each).groups:
                group.launch()
    return args, kwargs


def _refuse_substitutes(group: TraceableGroup) -> None:
    """Refuse a tensor of the user in place of an unsharded parameter, unless the call has noticed it (`_begin`)."""
    for param in () if group.is_hidden else group.params:
        fsdp_param, info = param.fsdp_param, param.fsdp_param._module_info
        held = info.module._parameters[info.param_name]
        if held is not fsdp_param._unsharded_param and held is not fsdp_param.sharded_param:
            checks.refuse_substitute(group.state, info.param_name)


def _begin_root(hooks: StateHooks, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Begin the forward of a root; move its inputs to the device, as eager FSDP2 does."""
    hooks.state._state_ctx.iter_forward_root = hooks.state
    hooks.root.is_traced = True
    hooks.root.is_ordered = False
    if hooks.root.lowered_budgets:
        pass  # Dynamo guards the attribute, and so traces again when it changes
    # For the whole forward, because the user's hooks must be traced with the backward, too. Otherwise Dynamo would
    # trace a tensor's hook immediately, and forget the earlier effects of our hooks.
    defer_hook_bodies()
    device = hooks.state._device
    return (args, kwargs) if device.type == "cpu" else move_tensors((args, kwargs), device)


def _watch_inputs(hooks: StateHooks, inputs: Any) -> None:
    # Frozen parameters get no gradient, so the inputs' gradients mark the end of their backward.
    tensors: list[torch.Tensor] = []
    find_tensors(inputs, tensors, [])
    for tensor in tensors:
        if tensor.requires_grad and not tensor.is_leaf:
            defer_hook_bodies()
            tensor.register_hook(partial(_after_backward, hooks))
            restore_hook_bodies()


@at_run_time
def _wait_for_prefetched(hooks: StateHooks, meets_graphs: bool) -> None:
    """Complete this module's eager prefetches in a partly compiled forward, because a graph cannot wait for them."""
    for group in hooks.groups:
        if group.memory is Memory.UNSHARDED_AHEAD:
            group.enter(Memory.UNSHARDED)
    root_state = hooks.state._state_ctx.iter_forward_root
    root_hooks = None if root_state is None else find_hooks(root_state)
    if root_hooks is None or not ((root := root_hooks.root).is_traced or meets_graphs):
        return
    for state in hooks.state._states_to_forward_prefetch:
        for group in hooks_of(state).groups:
            if not group.is_unsharded:
                group.fsdp_group.wait_for_unshard()
                group.enter(Memory.UNSHARDED_AHEAD, EAGER_GATHER)
                root.ahead.append(group)


def _after_module(member: ModuleHooks, output: Any) -> Any:
    """End the forward of a module; the last of several modules ends the forward of their state."""
    hooks = member.hooks
    if len(hooks.members) == 1:
        return _after_forward(hooks, output)
    if member.is_awaited:
        member.is_awaited = False
        # If the module is called without the root, no later hook ends this forward.
        if hooks.state._state_ctx.iter_forward_root is hooks.state or not hooks.awaits_members:
            return _after_forward(hooks, output)
    return _cast_output(hooks, output)


def _after_forward(hooks: StateHooks, output: Any) -> Any:
    output = complete(hooks, output)
    context = hooks.state._state_ctx
    if context.iter_forward_root is hooks.state:
        for each in hooks.root.shared:
            if each.awaits_members:  # the forward ran only some modules of the state
                output = complete(each, output)
        if _prefetches(hooks):
            for each in hooks.root.all_hooks:
                for group in each.groups:
                    group.drop_launched()  # the module was prefetched but did not run
        context.iter_forward_root = None
        hooks.root.is_traced = False
        restore_hook_bodies()
    return output


def complete(hooks: StateHooks, output: Any) -> Any:
    """Free the parameters and watch for the backward."""
    if len(hooks.members) > 1:
        hooks.await_members(False)
    for group in hooks.groups:
        reshard_after_forward(group)
    watched = _watched_outputs(hooks, output)
    previous, is_whole = _leave(hooks, len(watched) > 0)
    for tensor in watched:
        defer_hook_bodies()
        tensor.register_hook(partial(_pre_backward, hooks, previous, is_whole))
        restore_hook_bodies()
    return _cast_output(hooks, output)


def _watched_outputs(hooks: StateHooks, output: Any) -> list[torch.Tensor]:
    """Return the output tensors whose gradients start the module's backward."""
    tensors: list[torch.Tensor] = []
    unknown: list[str] = []
    if not torch.is_grad_enabled() or not hooks.groups:
        return tensors
    find_tensors(output, tensors, unknown)
    watched = [tensor for tensor in tensors if tensor.requires_grad]
    # An object of unknown type, such as a key-value cache, is harmless beside tensors that show the backward's start,
    # or that show that a frozen module has none.
    if unknown and not watched and not (tensors and all([group.is_frozen for group in hooks.groups])):
        checks.refuse_output(hooks.state, tuple(unknown))
    return watched


def _cast_output(hooks: StateHooks, output: Any) -> Any:
    dtype = hooks.state._mp_policy.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


def _pre_backward(hooks: StateHooks, previous: int, is_whole: bool, grad: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_dynamo_compiling():
        hooks.root.order_gathers()
        start_backward(hooks.state)
        for group in hooks.groups:
            begin_eagerly(group)
    for group in hooks.groups:
        begin(group, _next_in_backward(hooks, previous, group))
        if not is_whole:
            # A checkpoint may rerun the forward as eager code, which reads the modules' parameters.
            register_unsharded(group)
    return grad


def _next_in_backward(hooks: StateHooks, previous: int, group: TraceableGroup) -> list[TraceableGroup]:
    """Return the groups of the user's prefetch list, or else of module `previous` (see `_leave`), to gather ahead."""
    if group is not hooks.groups[-1]:
        return []
    ahead = [hooks_of(state) for state in hooks.state._states_to_backward_prefetch]
    if not ahead and group.backward_prefetch is not None and previous >= 0:
        ahead = [hooks.root.all_hooks[previous]]
    return [each for hooks in ahead for each in reversed(hooks.groups)]


def _after_backward(hooks: StateHooks, grad: torch.Tensor) -> torch.Tensor:
    for group in hooks.groups:
        if group.backward.is_compiled and group.is_frozen:
            reshard_idle(group)
    return grad


@eval_at_trace_time_guarded
def _enter(hooks: StateHooks) -> None:
    """Initialise the FSDP2 state and refuse unsupported models, before the graph gets any op."""
    keep_later_writes()
    initialise(hooks)
    ahead = (*hooks.state._states_to_forward_prefetch, *hooks.state._states_to_backward_prefetch)
    prepare_groups((hooks, *map(hooks_of, ahead)))
    if any(group.has_eager_slices for group in hooks.groups):
        checks.refuse_eager_slices(hooks.state)  # the root's call has resharded all others
    trace_record.enter(hooks)


@eval_at_trace_time_guarded
def _prefetches(hooks: StateHooks) -> bool:
    """Return whether any module of the model prefetches in the forward; each module guards its own list."""
    return any(state._states_to_forward_prefetch for state in hooks.state._state_ctx.all_states)


@eval_at_trace_time_guarded
def _leave(hooks: StateHooks, has_backward: bool) -> tuple[int, bool]:
    """Return the last module with a backward that ended its forward before, and whether this one began in this trace.

    The module is a position in `Root.all_hooks`, -1 for none: Dynamo would keep an object alive with its guards.
    """
    previous, is_whole = trace_record.leave(hooks, has_backward)
    all_hooks = hooks.root.all_hooks
    return (all_hooks.index(previous) if previous in all_hooks else -1), is_whole


@at_run_time
def prepare_model(hooks: StateHooks) -> tuple[frozenset[str], frozenset[str]]:
    """Prepare a model as its first trace does.

    Returns the names of the process groups that gather parameters, and of the others in the meshes of the parameters.
    """
    initialise(hooks)
    prepare_groups(hooks.root.all_hooks)
    groups = [group for each in hooks.root.all_hooks for group in each.groups]
    gathering = frozenset(filter(None, (group.constants.gather_group for group in groups)))
    shards: list[Any] = [param.fsdp_param.sharded_param for group in groups for param in group.params]
    meshes = dict.fromkeys(shard.device_mesh for shard in shards)  # in an order that is equal on all ranks
    return gathering, frozenset(name_in_graphs(each) for mesh in meshes for each in mesh.get_all_groups()) - gathering
