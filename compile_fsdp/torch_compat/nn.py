"""torch.nn and torch.optim: private attributes of modules, wrapper modules, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from compile_fsdp.torch_compat.declarations import needs_attributes
from compile_fsdp.torch_compat.dynamo import OptimizedModule

# A module's hooks, the eager and compiled calls that run them, and its direct parameters by name. (2.11.0 to 2.15.0)
needs_attributes(nn.Module, "_call_impl", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_parameters")


def wrapped_child(module: nn.Module) -> str | None:
    """The child name of a wrapper module, which FQNs leave out; None if the module is no wrapper. (2.13.0)"""
    if isinstance(module, OptimizedModule):
        return "_orig_mod"
    if isinstance(module, ActivationWrapper):  # activation checkpointing and activation offloading
        return "_checkpoint_wrapped_module"
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    return None


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """The optimizer class's `step` without torch's wrapper of step hooks and profiler range. (2.13.0)"""
    step: Any = type(optimizer).step
    return cast(Callable[..., object], step.__wrapped__ if getattr(step, "hooked", False) else step)
