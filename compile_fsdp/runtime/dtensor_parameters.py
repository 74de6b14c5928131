"""Unsharded parameters as DTensors over a mesh that has the data-parallel dims as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from compile_fsdp.torch_compat.distributed import DTensorSpec


def wraps_as_dtensor(spec: DTensorSpec, data_parallel_dims: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a DTensor of this rank's part of a parameter.

    The DTensor's gradient keeps its placements over the data-parallel dims, most of all partial sums: FSDP2's own
    reduction takes these for what the ranks have to add up, and DTensor.from_local would add them up before.

    Args:
        spec: Of the DTensor.
        data_parallel_dims: Dims of its mesh.
    """
    assert spec.tensor_meta is not None
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride

    def wrap(local: torch.Tensor) -> torch.Tensor:
        wrapped = DTensor.from_local(
            local.detach(), spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
        )
        return _AsDTensor.apply(local, wrapped, spec.placements, data_parallel_dims)  # type: ignore[no-any-return, no-untyped-call]

    # Dynamo would trace the backward for a gradient with the placements of the parameter.
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
