"""Files that torch writes in C++, and checkpoints of a world whose collectives do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import default_planner, utils

from compile_fsdp.torch_compat.declarations import needs


@needs("torch._C.PyTorchFileWriter")
def file_writer() -> Callable[..., Any]:
    """Opens the file of torch.save, by a name or a Python file. (2.13.0)"""
    writer: Callable[..., Any] = torch._C.PyTorchFileWriter
    return writer


@contextmanager
@needs(
    "torch.distributed.checkpoint.default_planner._validate_global_plan",
    "torch.distributed.checkpoint.utils._DistWrapper",
)
def checkpoints_of_one_rank() -> Iterator[None]:
    """Let torch.distributed.checkpoint save and load the shards of this rank alone. (2.13.0)"""
    wrapper: Any = utils._DistWrapper
    init, validate = wrapper.__init__, default_planner._validate_global_plan
    # Later releases return the errors, earlier ones whether there are none. (2.11.0, 2.13.0)
    nothing_wrong: Any = True if inspect.signature(validate).return_annotation in (bool, "bool") else []
    default_planner._validate_global_plan = lambda *args, **kwargs: nothing_wrong
    wrapper.__init__ = lambda self, group, use_dist, coordinator_rank: init(self, None, False, 0)
    try:
        yield
    finally:
        default_planner._validate_global_plan = validate
        wrapper.__init__ = init


@contextmanager
def new_groups_are_fake() -> Iterator[None]:
    """Make further process groups with the backend of the fake one, whatever backend they ask for. (2.13.0)"""
    new_group: Any = distributed_c10d.new_group

    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **kwargs)

    torch.distributed.new_group = distributed_c10d.new_group = new_fake_group
    try:
        yield
    finally:
        torch.distributed.new_group = distributed_c10d.new_group = new_group
