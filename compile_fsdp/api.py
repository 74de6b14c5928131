"""`fully_shard` and `make_traceable`: prepare a model for full-graph compilation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compile_fsdp.errors import FSDP1Error, NotShardedError, ProcessGroupMissingError
from compile_fsdp.runtime.module import TraceableModule, install
from compile_fsdp.runtime.root import Replay
from compile_fsdp.runtime.stale_optimizers import note_replaced
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import fsdp_state


@overload
def fully_shard(module: nn.Module, **kwargs: Any) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **kwargs: Any) -> list[FSDPModule]: ...
def fully_shard(module: nn.Module | list[nn.Module], **kwargs: Any) -> FSDPModule | list[FSDPModule]:
    """Shard a module with torch's own `fully_shard`, and make it traceable.

    In eager mode the module behaves exactly as torch's FSDP2 module. Under the `compile_fsdp` backend its hooks become
    ops of the compiled graph.

    Args:
        module: The module to shard in place, or a list of modules that share one parameter group.
        **kwargs: Arguments of the installed torch's `torch.distributed.fsdp.fully_shard`.
    Returns:
        `module` itself.
    Raises:
        ProcessGroupMissingError: no mesh is given and there is no process group to build one from.
    """
    modules = module if isinstance(module, list) else [module]
    check_process_group(modules, kwargs)
    before = [(each, name, parameter) for each in modules for name, parameter in each.named_parameters()]
    sharded = torch_fully_shard(module, **kwargs)
    for each in modules:
        make_traceable(each)
    state = fsdp_state(modules[0])
    assert state is not None
    note_replaced(state, before)
    return sharded


def check_process_group(modules: Iterable[nn.Module], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of `fully_shard` without a mesh if there is no process group to build one from."""
    if kwargs.get("mesh") is None and not dist.is_initialized() and "RANK" not in os.environ:
        names = ", ".join(type(each).__name__ for each in modules)
        raise ProcessGroupMissingError(
            f"expected a mesh or an initialised process group to shard {names} over, found neither; "
            "call torch.distributed.init_process_group(), run under torchrun, or pass mesh="
        )


@at_run_time
def _start_replay(arguments: dict[str, Any]) -> tuple[Replay | None, dict[str, Any]]:
    from compile_fsdp.replay.model import start_replay  # imported here, because eager models do not need it

    return start_replay(arguments)


def make_traceable(model: nn.Module) -> nn.Module:
    """Make every FSDP2 module of a model traceable, after torch's own `fully_shard`.

    Eager runs do not change. A module that is already traceable is left unchanged.

    Args:
        model: A model sharded with torch's own `fully_shard`.
    Returns:
        `model` itself.
    Raises:
        FSDP1Error: the model contains FullyShardedDataParallel modules.
        NotShardedError: the model contains no FSDP2 module.
    """
    named = list(model.named_modules())
    fsdp1 = [fqn or "the root" for fqn, module in named if isinstance(module, FullyShardedDataParallel)]
    if fsdp1:
        raise FSDP1Error(
            f"expected FSDP2 modules, got FullyShardedDataParallel at {fsdp1}; "
            "shard with fully_shard() instead (torch's FSDP1-to-FSDP2 guide lists the differences)"
        )
    sharded: list[Any] = [module for _, module in named if isinstance(module, FSDPModule)]
    if not sharded:
        raise NotShardedError(
            f"expected a model sharded with fully_shard(), found no FSDP2 module in {type(model).__name__}; "
            "call compile_fsdp.fully_shard() on its blocks and then on the model"
        )
    for module in sharded:
        if not isinstance(module, TraceableModule):
            install(module, _start_replay)
    return model


def drop_cuda_graphs() -> None:
    """Forget all CUDA graphs that `mode="reduce-overhead"` has captured in this process.

    `torch.distributed.destroy_process_group()` waits for ever for a graph that uses its communicator (pytorch issue
    115388), so call this function first. A step that runs later is captured again.
    """
    from compile_fsdp.backend.device_graphs import drop_captures  # here, because it imports Inductor

    drop_captures()
