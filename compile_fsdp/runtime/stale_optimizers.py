"""Warn of optimizers made before `fully_shard`, which keep the parameters that it replaces."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from compile_fsdp.errors import StaleOptimizerWarning
from compile_fsdp.runtime.attached import find_hooks, hooks_of
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import FSDPState, fsdp_state


@at_run_time
def note_replaced(state: FSDPState, before: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Remember, by weak reference, the parameters that the state's modules no longer hold.

    `before` has the earlier parameters, each with its module and its name in the module.
    """
    present = {id(parameter) for module in state._modules for parameter in module.parameters()}
    hooks_of(state).replaced = [
        (module, name, weakref.ref(each)) for module, name, each in before if id(each) not in present
    ]


@at_run_time
def warn_of_stale_optimizers(model: nn.Module) -> None:
    """Warn, once for each parameter, if an optimizer holds parameters that `fully_shard` replaced."""
    if not torch.is_grad_enabled():  # an optimizer is of no use without a backward
        return
    stale = {}
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    for state in map(fsdp_state, model.modules()):
        if state is None or (hooks := find_hooks(state)) is None:
            continue
        replaced, hooks.replaced = hooks.replaced, []
        for module, name, reference in replaced:
            if (parameter := reference()) is not None:
                stale[id(parameter)] = (parameter, ".".join(filter(None, (fqns.get(id(module)), name))))
    if not stale:  # the usual case, without a search through all objects of the process
        return
    for optimizer in gc.get_objects():
        if issubclass(type(optimizer), torch.optim.Optimizer):
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            names = [fqn for key, (_, fqn) in stale.items() if key in held]
            if names:
                warnings.warn(
                    f"{type(optimizer).__name__} holds {names[:3]} ({len(names)} in all) as they were before "
                    "fully_shard() replaced them: its steps do not change the model; make the optimizer after the "
                    "last fully_shard() call",
                    StaleOptimizerWarning,
                    stacklevel=2,
                )
