"""Attributes that lead from torch's own objects to this folder's; only this file sets and reads them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.root import ModuleHooks, StateHooks
from compile_fsdp.runtime.tracing import at_run_time, inline_only
from compile_fsdp.torch_compat.fsdp import HAS_GRAD_DTYPES, FSDPParam, FSDPState

# Up to 2.14, eager FSDP2 keeps a gradient that is not in the unsharded parameter's dtype in a separate attribute. Since
# 2.15 it does not, so this project keeps such a gradient in its own attribute.
_ACCUMULATED_GRAD = "_compile_fsdp_accumulated_grad" if HAS_GRAD_DTYPES else "unsharded_accumulated_grad"


@at_run_time
def attach(hooks: StateHooks) -> None:
    hooks.state._compile_fsdp_hooks = hooks  # type: ignore[attr-defined]
    for member in hooks.members:
        member.module._compile_fsdp_hooks = member  # type: ignore[assignment]


@inline_only
def hooks_of(state: FSDPState) -> StateHooks:
    """Return the hooks of a traceable state; raise AttributeError if the state is not traceable."""
    hooks: StateHooks = state._compile_fsdp_hooks  # type: ignore[attr-defined]
    return hooks


@inline_only
def find_hooks(state: FSDPState) -> StateHooks | None:
    """Return the hooks of a state, or None if the state is not traceable."""
    return getattr(state, "_compile_fsdp_hooks", None)


@inline_only
def module_hooks_of(module: Any) -> ModuleHooks:
    """Return the two forward hooks of a traceable module."""
    hooks: ModuleHooks = module._compile_fsdp_hooks
    return hooks


@at_run_time
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
    return getattr(fsdp_param, _ACCUMULATED_GRAD, None)


@inline_only
def set_accumulated_gradient(fsdp_param: FSDPParam, grad: torch.Tensor | None) -> None:
    """Keep the unsharded gradient of earlier microbatches separately, or drop it if `grad` is None."""
    setattr(fsdp_param, _ACCUMULATED_GRAD, grad)
