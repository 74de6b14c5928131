"""The forward hooks of one sharded module: torch's own in eager mode, their traced counterpart under Dynamo.

[Note: Where the root is traced]
torch.compile starts tracing below `Module.__call__`, so that a compiled module's own hooks would become graphs
of their own. `TraceableModule._call_impl` is the frame that is compiled instead: hooks and forward of the root
are then inlined into one graph, as those of every other module are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from compile_fsdp.compat import (
    FSDPState,
    call_with_side_effects,
    defer_hook_bodies,
    param_groups,
    restore_hook_bodies,
    runs_while_tracing,
    tree_map_only,
)
from compile_fsdp.runtime import checks, scope
from compile_fsdp.runtime.group import TraceableGroup, start_backward
from compile_fsdp.runtime.outputs import find_tensors


class ModuleHooks:
    """Pre- and post-forward hook of one module that `fully_shard` was applied to.

    Registered in the place of torch's own two hooks, so that their order among the user's hooks stays.
    """

    def __init__(self, module: nn.Module, state: FSDPState) -> None:
        self.module = module
        self.state = state
        self.groups = [TraceableGroup(group, state) for group in param_groups(state)]

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_dynamo_compiling():
            _enter(self)
            return call_with_side_effects(self._traced_pre_forward, args, kwargs)
        return self.state._pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            output = call_with_side_effects(self._traced_post_forward, output)
            _leave(self)
            return output
        return self.state._post_forward(module, args, output)

    def _traced_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        context = self.state._state_ctx
        if context.iter_forward_root is None:
            if not self.state._is_root:
                _refuse_not_root(self)
            context.iter_forward_root = self.state
            if self.state._device.type != "cpu":  # where eager FSDP2 moves the root's inputs, too
                device = self.state._device
                args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        policy = self.state._mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        for group in self.groups:
            reason = checks.unsupported_setting(group.group)
            if reason is not None:
                _refuse(self, reason)
            if not group.is_unsharded:
                group.unshard()
                group.register(unsharded=True)
        return args, kwargs

    def _traced_post_forward(self, output: Any) -> Any:
        for group in self.groups:
            if group.group._reshard_after_forward:
                group.reshard()
                group.register(unsharded=False)
        if torch.is_grad_enabled():
            self._watch_outputs(output)
        context = self.state._state_ctx
        if context.iter_forward_root is self.state:
            context.iter_forward_root = None
        dtype = self.state._mp_policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    def _watch_outputs(self, output: Any) -> None:
        tensors: list[torch.Tensor] = []
        unknown: list[str] = []
        find_tensors(output, tensors, unknown)
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if unknown and not tensors:
            # Beside tensors such an object is harmless, a key-value cache for example.
            _refuse_output(self, tuple(unknown))
        for tensor in tensors:
            defer_hook_bodies()
            tensor.register_hook(partial(_pre_backward, self))
            restore_hook_bodies()


def _pre_backward(hooks: ModuleHooks, grad: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_dynamo_compiling():
        # A hook that runs outside of a compiled backward, since its forward frame fell back to eager.
        start_backward(hooks.state)
    for group in hooks.groups:
        group.begin_backward()
    return grad


def _cast(nested: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nested
    )


# What follows runs for real while Dynamo traces.


@runs_while_tracing
def _enter(hooks: ModuleHooks) -> None:
    """Initialise the FSDP2 state and refuse what cannot be compiled, before the graph gets any op."""
    if hooks.state._is_root is not False:
        checks.check_parameters(hooks.module, hooks.state)
    hooks.state._lazy_init()
    for group in hooks.groups:
        checks.check_group(group.group)
        group.prepare()
    scope.enter(hooks)


@runs_while_tracing
def _leave(hooks: ModuleHooks) -> None:
    scope.leave(hooks)


@runs_while_tracing
def _refuse(hooks: ModuleHooks, reason: str) -> None:
    checks.refuse(hooks.module, hooks.state, reason)


@runs_while_tracing
def _refuse_not_root(hooks: ModuleHooks) -> None:
    checks.refuse_not_root(hooks.module, hooks.state)


@runs_while_tracing
def _refuse_output(hooks: ModuleHooks, types: tuple[str, ...]) -> None:
    checks.refuse_output(hooks.module, hooks.state, types)
