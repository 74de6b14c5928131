"""torch.nn and torch.optim: modules, those that only wrap another one, and the steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from compile_fsdp.torch_compat.declarations import needs, needs_attributes

# The hooks of a module, the call that runs them, also compiled, and its own parameters by name. (2.11.0 to 2.15.0)
needs_attributes(
    nn.Module, "_call_impl", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_parameters"
)


@needs(
    "torch._dynamo.OptimizedModule",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
)
def wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a module only wraps: it has no place in an FQN. None for any other module. (2.13.0)"""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    if isinstance(module, torch._dynamo.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, ActivationWrapper):  # of activation checkpointing and of offloading
        return "_checkpoint_wrapped_module"
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    return None


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """The class's own `step`, without the step hooks and the profiler's range that torch puts around it. (2.13.0)"""
    step: Any = type(optimizer).step
    return cast(Callable[..., object], step.__wrapped__ if getattr(step, "hooked", False) else step)
