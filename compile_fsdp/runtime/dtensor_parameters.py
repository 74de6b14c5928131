"""Unsharded parameters as DTensors over a mesh that includes the data-parallel dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from compile_fsdp.torch_compat.distributed import DTensorSpec


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor of this rank's part; Dynamo does not trace the constructor that takes a spec."""
    assert spec.tensor_meta is not None
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)


def wraps_as_dtensor(spec: DTensorSpec, data_parallel_dims: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that wraps this rank's part of a parameter in a DTensor.

    The DTensor's gradient keeps its placements over the data-parallel dims, above all partial sums, which FSDP2's own
    reduction adds up. DTensor.from_local would add them up earlier.
    """

    def wrap(local: torch.Tensor) -> torch.Tensor:
        wrapped = as_dtensor(local.detach(), spec)
        return _AsDTensor.apply(local, wrapped, spec.placements, data_parallel_dims)  # type: ignore[no-any-return, no-untyped-call]

    # In the graph as one call, because Dynamo would trace the backward for a gradient with the parameter's placements.
    marked: Callable[[torch.Tensor], torch.Tensor] = torch.compiler.allow_in_graph(wrap)
    return marked


class _AsDTensor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, wrapped: DTensor, placements: tuple[Placement, ...], dims: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.placements, ctx.dims = placements, dims
        return wrapped.view_as(wrapped)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor | None, ...]:
        wanted = tuple(grad.placements[i] if i in ctx.dims else each for i, each in enumerate(ctx.placements))
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return grad.to_local(), None, None, None
