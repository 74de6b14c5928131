"""Attributes that this project sets on torch's own objects; only this file sets and reads them.

Torch's objects outlive a compiled graph, and torch passes them to hooks. So traced and eager code find the objects of
this folder through them.
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

# Up to 2.14, eager FSDP2 keeps a gradient that is not in the unsharded parameter's dtype in a separate attribute. Since
# 2.15 it does not, so this project keeps such a gradient in its own attribute.
_ACCUMULATED_GRAD = "_compile_fsdp_accumulated_grad" if HAS_GRAD_DTYPES else "unsharded_accumulated_grad"


@inline_only
def set_hooks(state: FSDPState, hooks: StateHooks) -> None:
    """Attach the hooks of all modules of an FSDP2 state."""
    state._compile_fsdp_hooks = hooks  # type: ignore[attr-defined]


@inline_only
def hooks_of(state: FSDPState) -> StateHooks:
    """Return the hooks of a traceable state; raise AttributeError if the state is not traceable."""
    hooks: StateHooks = state._compile_fsdp_hooks  # type: ignore[attr-defined]
    return hooks


@inline_only
def find_hooks(state: FSDPState) -> StateHooks | None:
    """Return the hooks of a state, or None if the state is not traceable."""
    return getattr(state, "_compile_fsdp_hooks", None)


# Parameters that `fully_shard` replaced: the module, the name in it, and a weak reference to the parameter.
Replaced = list[tuple[nn.Module, str, "weakref.ref[nn.Parameter]"]]


@at_run_time
def set_replaced(state: FSDPState, replaced: Replaced) -> None:
    """Attach the parameters that `fully_shard` replaced in the modules of an FSDP2 state."""
    state._compile_fsdp_replaced = replaced  # type: ignore[attr-defined]


@at_run_time
def replaced_of(state: FSDPState) -> Replaced:
    """Return the replaced parameters; empty if torch's own `fully_shard` sharded the model."""
    return getattr(state, "_compile_fsdp_replaced", [])


@inline_only
def set_module_hooks(module: nn.Module, hooks: ModuleHooks) -> None:
    """Attach the two forward hooks of one module."""
    module._compile_fsdp_hooks = hooks  # type: ignore[assignment]


@inline_only
def module_hooks_of(module: Any) -> ModuleHooks:
    """Return the two forward hooks of a traceable module."""
    hooks: ModuleHooks = module._compile_fsdp_hooks
    return hooks


@inline_only
def set_group(fsdp_group: FSDPParamGroup, group: TraceableGroup) -> None:
    """Attach the traced counterpart of a parameter group."""
    fsdp_group._compile_fsdp_group = group  # type: ignore[attr-defined]


@inline_only
def find_group(fsdp_group: FSDPParamGroup) -> TraceableGroup | None:
    """Return the traced counterpart of a parameter group, or None if it is not traceable."""
    return getattr(fsdp_group, "_compile_fsdp_group", None)


@inline_only
def set_owner(unsharded_param: torch.Tensor, group: TraceableGroup) -> None:
    """Attach the group to an unsharded parameter, weakly because compiled graphs keep parameters."""
    unsharded_param._compile_fsdp_owner = weakref.ref(group)  # type: ignore[attr-defined]


@inline_only
def owner_of(unsharded_param: object) -> TraceableGroup | None:
    """Return an unsharded parameter's group; None for an object without group or if the group is gone."""
    owner = getattr(unsharded_param, "_compile_fsdp_owner", None)
    return None if owner is None else owner()


@inline_only
def accumulated_gradient(fsdp_param: FSDPParam) -> torch.Tensor | None:
    """Return the separately kept gradient of earlier microbatches, or None; see `free_gradient_dtypes`."""
    grad: torch.Tensor | None = getattr(fsdp_param, _ACCUMULATED_GRAD, None)
    return grad


@inline_only
def set_accumulated_gradient(fsdp_param: FSDPParam, grad: torch.Tensor | None) -> None:
    """Keep the unsharded gradient of earlier microbatches separately, or drop it if `grad` is None."""
    setattr(fsdp_param, _ACCUMULATED_GRAD, grad)
