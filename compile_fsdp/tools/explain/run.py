"""`explain`: compile one step of a model and report on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp.errors import ExplainError
from compile_fsdp.runtime.outputs import find_tensors
from compile_fsdp.state.names import named_parameters
from compile_fsdp.tools.explain.capture import capture
from compile_fsdp.tools.explain.report import Report, make_report
from compile_fsdp.torch_compat.fsdp import fsdp_state


def explain(
    model: nn.Module, *example_inputs: Any, world_size: int | None = None, options: Mapping[str, Any] | None = None
) -> Report:
    """Compile and run one step of a model, and report on it.

    The step is the forward, and the backward of the sum of the outputs. A sharded model runs as it is, on its process
    group; `explain` restores its gradients and buffers afterwards, so that training can go on. An unsharded model is
    copied, and the copy is sharded by the default policy of `compile_fsdp.wrap`: over the present process group, or
    over a fake group of `world_size` ranks, whose collectives do nothing. The copy of a model on the meta device gets
    zeros as parameters, on the device of the inputs.

    Collective if a process group is initialised: all its ranks call it.

    Args:
        model: The outermost module to compile.
        *example_inputs: Positional arguments of the model's forward on one rank.
        world_size: Number of ranks to shard over if no process group is initialised.
        options: Options of the backend, see `compile_fsdp.Options`.
    Returns:
        The report, with the methods `.print()`, `.save_html(path)` and `.to_dict()`.
    Raises:
        ExplainError: if `world_size` differs from the size of the process group, or if there is no process group and
            the model is sharded or `world_size` is missing or less than 1.
        CompileFSDPError: if the model cannot be sharded or compiled; the subclass names the reason.
    """
    from compile_fsdp.backend.compile import compile_fsdp

    is_sharded = any(fsdp_state(module) is not None for module in model.modules())
    with _world(world_size, is_sharded):
        own = model if is_sharded else _sharded_copy(model, example_inputs)
        with _unchanged(own), capture() as captured:
            run = torch.compile(own, backend=partial(compile_fsdp, options=options))
            tensors: list[torch.Tensor] = []
            find_tensors(run(*example_inputs), tensors, [])
            losses = [tensor.float().sum() for tensor in tensors if tensor.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        return make_report(captured, type(model).__name__.removeprefix("FSDP"), dist.get_world_size())


@contextmanager
def _world(world_size: int | None, is_sharded: bool) -> Iterator[None]:
    """Use the present process group, or a fake process group inside the block."""
    if dist.is_initialized():
        present = dist.get_world_size()
        if world_size not in (None, present):
            raise ExplainError(
                f"expected world_size={present}, which is the size of the process group, or none, got {world_size}; "
                "another size can be explained where no process group is initialised"
            )
        yield
        return
    if is_sharded or world_size is None:
        raise ExplainError(
            "expected an initialised process group, or an unsharded model and world_size, got neither; initialise one, "
            "or pass the unsharded model and the number of ranks to explain it for"
        )
    if world_size < 1:
        raise ExplainError(f"expected world_size to be at least 1, got {world_size}")
    from compile_fsdp.tools.launch import fake_world  # imported here, because it loads torch's checkpoints

    with fake_world(world_size):
        yield


def _sharded_copy(model: nn.Module, example_inputs: tuple[Any, ...]) -> nn.Module:
    from compile_fsdp.wrap import auto_shard

    tensors: list[torch.Tensor] = []
    find_tensors(example_inputs, tensors, [])
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    own = copy.deepcopy(model)
    is_meta = any(tensor.is_meta for tensor in (*own.parameters(), *own.buffers()))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    auto_shard(own, mesh=mesh)
    if is_meta:
        own.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*own.parameters(), *own.buffers()):
                tensor.zero_()
    return own


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random states at the end of the block."""
    grads = {named.parameter: named.parameter.grad for named in named_parameters(model)}  # also of unsharded groups
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    for parameter in grads:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
        for present, before in held:
            present.update(before)
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
