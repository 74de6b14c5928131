"""`compile_fsdp::hook_point`: where a backward graph is to call a hook on a gradient.

[Note: Hooks by number]
Dynamo leaves a tensor's hook to the backward by a node that holds Python objects, which no compiler cache can take.
The forward graph gets `watch` in its place, which names the hook by a number. So the backward that AOTAutograd
derives contains this op, and the hook of that number is called there once the whole backward is traced. Both stand in
`ops/`, whose sources are part of every cache key.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.library.custom_op("compile_fsdp::hook_point", mutates_args=())
def hook_point(grad: Tensor, number: int) -> Tensor:
    """The gradient that the hook of this number makes of `grad`. Only a place in a graph: it does not call the hook."""
    raise NotImplementedError("expected hook_point to be replaced by its hook before the backward runs")


@hook_point.register_fake
def _(grad: Tensor, number: int) -> Tensor:
    return torch.empty_like(grad)


def watch(tensor: Tensor, number: int) -> None:
    """Mark where the backward of `tensor`, an intermediate of the forward, calls the hook of this number."""
    tensor.register_hook(partial(_mark, number))


def _mark(number: int, grad: Tensor) -> Tensor:
    with torch.no_grad():
        if not isinstance(grad, DTensor):
            marked: Tensor = hook_point(grad, number)
            return marked
        local = hook_point(grad.to_local(), number)
        return DTensor.from_local(
            local, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
        )
