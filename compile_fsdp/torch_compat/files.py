"""torch's C++ file writer, and distributed checkpoints under a fake process group."""

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
    """The class that opens torch.save's output, given a path or a Python file. (2.13.0)"""
    return torch._C.PyTorchFileWriter


@contextmanager
@needs(
    "torch.distributed.checkpoint.default_planner._validate_global_plan",
    "torch.distributed.checkpoint.utils._DistWrapper",
)
def checkpoints_of_one_rank() -> Iterator[None]:
    """Make torch.distributed.checkpoint save and load only this rank's shards. (2.13.0)"""
    wrapper: Any = utils._DistWrapper
    init, validate = wrapper.__init__, default_planner._validate_global_plan
    # Earlier releases return True for a valid plan, later releases a list of errors. (2.11.0, 2.13.0)
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
    """Create new process groups with the fake backend, and keep a default process group that exists. (2.13.0)"""
    new_group: Any = distributed_c10d.new_group
    init: Any = distributed_c10d.init_process_group

    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **kwargs)

    def keep_group(*args: Any, **kwargs: Any) -> None:
        if not distributed_c10d.is_initialized():
            init(*args, **kwargs)

    torch.distributed.new_group = distributed_c10d.new_group = new_fake_group
    torch.distributed.init_process_group = distributed_c10d.init_process_group = keep_group
    try:
        yield
    finally:
        torch.distributed.new_group = distributed_c10d.new_group = new_group
        torch.distributed.init_process_group = distributed_c10d.init_process_group = init
