"""Register the emulated device, its process group and its compiler support with torch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups
from helpers.device.extension import load_extension
from helpers.device.inductor import register as register_compiler
from helpers.device.module import NAME, make_module


@functools.cache
def install() -> ModuleType:
    """Register the device once per process; return its extension."""
    extension = load_extension()
    extension.register_device()
    torch.utils.rename_privateuse1_backend(NAME)
    module = make_module(extension)
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_compiler()
    dist.Backend.register_backend(NAME, functools.partial(_make_process_group, extension), devices=[NAME])
    atexit.register(torch.accelerator.synchronize)  # before process exit frees memory its threads use
    return extension


def _make_process_group(extension: ModuleType, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return extension.make_process_group(dist.ProcessGroupGloo(store, rank, size, timeout))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep all streams from starting tasks."""
    install().hold_streams(True)
    try:
        yield
    finally:
        install().hold_streams(False)


@contextlib.contextmanager
def delayed(seed: int, most_us: float) -> Iterator[None]:
    """Delay each task by a random time of at most `most_us` microseconds."""
    install().set_delays(seed, most_us)
    try:
        yield
    finally:
        install().set_delays(0, 0.0)


def name_parameters(model: nn.Module) -> None:
    """Name shards in race errors, and after a first step unsharded parameters."""
    extension = install()
    for fqn, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        extension.name_storage(local.detach(), f"{fqn} (shard)" if isinstance(parameter, DTensor) else fqn)
    for state in (fsdp_state(module) for module in model.modules()):
        for group in param_groups(state) if state is not None else ():
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    extension.name_storage(parameter._unsharded_param.detach(), parameter._param_fqn)
