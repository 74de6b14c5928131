"""What this project hangs on torch's own objects: each attribute is set and read here, and nowhere else.

Torch's objects outlive a compiled graph and are what torch hands to hooks, so they are where traced and eager code find
the objects of this folder.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_fsdp.runtime.tracing import at_run_time, inline_only
from compile_fsdp.torch_compat.fsdp import HAS_GRAD_DTYPES, FSDPParam, FSDPParamGroup, FSDPState

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup
    from compile_fsdp.runtime.hooks import ModuleHooks, StateHooks

# Eager FSDP2 keeps gradients that are not in the unsharded parameter's dtype apart, in an attribute of its own, up to
# 2.14; since then this project does.
_ACCUMULATED_GRAD = "_compile_fsdp_accumulated_grad" if HAS_GRAD_DTYPES else "unsharded_accumulated_grad"


@inline_only
def set_hooks(state: FSDPState, hooks: StateHooks) -> None:
    """Attach the hooks of all modules of an FSDP2 state."""
    state._compile_fsdp_hooks = hooks  # type: ignore[attr-defined]


@inline_only
def hooks_of(state: FSDPState) -> StateHooks:
    """The hooks of a state that was made traceable. Raises AttributeError for any other state."""
    hooks: StateHooks = state._compile_fsdp_hooks  # type: ignore[attr-defined]
    return hooks


@inline_only
def find_hooks(state: FSDPState) -> StateHooks | None:
    """The hooks of a state, None before it was made traceable."""
    return getattr(state, "_compile_fsdp_hooks", None)


# Parameters that `fully_shard` has replaced: the module, the name in it, and the parameter itself if somebody holds it.
Replaced = list[tuple[nn.Module, str, "weakref.ref[nn.Parameter]"]]


@at_run_time
def set_replaced(state: FSDPState, replaced: Replaced) -> None:
    """Attach what `fully_shard` has replaced in the modules of an FSDP2 state."""
    state._compile_fsdp_replaced = replaced  # type: ignore[attr-defined]


@at_run_time
def replaced_of(state: FSDPState) -> Replaced:
    """What was replaced; empty for a model that torch's own `fully_shard` has sharded."""
    return getattr(state, "_compile_fsdp_replaced", [])


@inline_only
def set_module_hooks(module: nn.Module, hooks: ModuleHooks) -> None:
    """Attach the two forward hooks of one module."""
    module._compile_fsdp_hooks = hooks  # type: ignore[assignment]


@inline_only
def module_hooks_of(module: Any) -> ModuleHooks:
    """The two forward hooks of a module that was made traceable."""
    hooks: ModuleHooks = module._compile_fsdp_hooks
    return hooks


@inline_only
def set_group(fsdp_group: FSDPParamGroup, group: TraceableGroup) -> None:
    """Attach the traced counterpart of a parameter group."""
    fsdp_group._compile_fsdp_group = group  # type: ignore[attr-defined]


@inline_only
def find_group(fsdp_group: FSDPParamGroup) -> TraceableGroup | None:
    """The traced counterpart of a parameter group, None before it was made traceable."""
    return getattr(fsdp_group, "_compile_fsdp_group", None)


@inline_only
def set_owner(unsharded_param: torch.Tensor, group: TraceableGroup) -> None:
    """Attach its group to an unsharded parameter, weakly: compiled graphs keep parameters."""
    unsharded_param._compile_fsdp_owner = weakref.ref(group)  # type: ignore[attr-defined]


@inline_only
def owner_of(unsharded_param: object) -> TraceableGroup | None:
    """The group of an unsharded parameter, None for any other object and once the group is gone."""
    owner = getattr(unsharded_param, "_compile_fsdp_owner", None)
    return None if owner is None else owner()


@inline_only
def accumulated_gradient(fsdp_param: FSDPParam) -> torch.Tensor | None:
    """The unsharded gradient of earlier microbatches where it is kept apart; see `free_gradient_dtypes`."""
    grad: torch.Tensor | None = getattr(fsdp_param, _ACCUMULATED_GRAD, None)
    return grad


@inline_only
def set_accumulated_gradient(fsdp_param: FSDPParam, grad: torch.Tensor | None) -> None:
    """Keep the unsharded gradient of earlier microbatches apart, or forget it."""
    setattr(fsdp_param, _ACCUMULATED_GRAD, grad)
