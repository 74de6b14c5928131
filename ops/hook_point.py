"""`compile_fsdp::hook_point`: the place in a backward graph that calls a hook.

[Note: Hooks by number]
Dynamo defers a tensor's hook to the backward by a node that holds Python objects, which no compiler cache can store.
The forward graph calls `watch` instead, which names the hook by a number. So the backward that AOTAutograd derives
contains this op, and when the whole backward is traced, that hook is called there. Both functions stand in `ops/`,
because its sources are part of every cache key.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.library.custom_op("compile_fsdp::hook_point", mutates_args=())
def hook_point(grad: Tensor, number: int) -> Tensor:
    """Mark where hook `number` changes `grad`, without calling the hook."""
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
        mesh, placements = grad.device_mesh, grad.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride())
