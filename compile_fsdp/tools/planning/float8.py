"""Linear layers that multiply in float8 and are gathered in it, as torchao has them with dynamic tensorwise scaling.

[Note: What float8 saves]
torchao's `Float8Linear` saves its input for the backward as it came, in the dtype of the activations, and casts it once
more there. So activations are as large as without float8, and a product's result has their dtype, too. Each rank casts
its shard of a weight, and an all-gather with `enable_fsdp_float8_all_gather` moves one byte per element; the unsharded
weight stays in float8. Gradients of weights have the dtype of the activations and are reduced as without float8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile_fsdp.errors import EstimateError

FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of a matrix product's sizes in float8


class Float8Linear(nn.Linear):
    """A linear layer that allocates what torchao's does. See [Note: What float8 saves].

    Attributes:
        fuses: Whether a cast allocates its result alone, as when the layer is compiled; torchao's eager one scales and
            clamps in float32.
    """

    fuses: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """(*, in_features) -> (*, out_features), in the input's dtype."""
        rows = input.reshape(-1, input.shape[-1])
        saved = _Gradients.apply(rows, self.weight, self.fuses)  # type: ignore[no-untyped-call]
        product: Tensor = _Product.apply(saved, rows, self.weight, self.fuses)  # type: ignore[no-untyped-call]
        result = product.reshape(*input.shape[:-1], product.shape[-1])
        return result if self.bias is None else result + self.bias


def convert_to_float8(model: nn.Module, head: nn.Module | None, *, fuses: bool) -> None:
    """Make a model's linear layers those of float8, but for the head and for layers with sizes that 16 does not divide.

    Raises:
        EstimateError: no layer is left.
    """
    found = [
        each
        for each in model.modules()
        if type(each) is nn.Linear
        and each is not head
        and each.in_features % MULTIPLE == each.out_features % MULTIPLE == 0
    ]
    if not found:
        raise EstimateError(
            f"expected linear layers with sizes that {MULTIPLE} divides beside the head, got none; plan without"
        )
    for each in found:
        each.__class__ = Float8Linear  # so that hooks and names of the layer stay
        each.fuses = fuses  # type: ignore[assignment]


def float8_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters that are gathered in float8."""
    return {id(each.weight) for each in model.modules() if isinstance(each, Float8Linear)}


class _Gradients(torch.autograd.Function):
    """Saves (T, I) rows and an (O, I) weight, and computes their gradients from that of a (T, O) product.

    It is apart from the product, since a layer that is computed again stops when the last tensor is saved: before its
    last product, which nothing reads there. Its result is one element, seen as many.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, fuses: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.fuses = fuses
        return rows.new_empty(1, 1).expand(rows.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        # The second factor has to be column-major, the first row-major.
        casts = [_cast(gradient, BACKWARD_DTYPE, ctx.fuses), torch.empty_like(weight, dtype=FORWARD_DTYPE)]
        of_rows = torch.mm(gradient, weight)
        casts.pop()
        if not ctx.fuses:
            casts.append(_cast(gradient, BACKWARD_DTYPE, ctx.fuses))
        casts.append(_cast(rows, FORWARD_DTYPE, ctx.fuses))
        casts += [torch.empty_like(gradient, dtype=BACKWARD_DTYPE), torch.empty_like(rows, dtype=FORWARD_DTYPE)]
        return of_rows, torch.mm(gradient.t(), rows), None


class _Product(torch.autograd.Function):
    """(T, I) rows and an (O, I) weight -> (T, O); the gradient goes to the result of `_Gradients`."""

    @staticmethod
    def forward(ctx: Any, saved: Tensor, rows: Tensor, weight: Tensor, fuses: bool) -> Tensor:
        cast = _cast(rows, FORWARD_DTYPE, fuses)
        product = torch.mm(rows, weight.t())
        del cast
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


def _cast(tensor: Tensor, dtype: torch.dtype, fuses: bool) -> Tensor:
    if fuses:
        return tensor.to(dtype)
    scaled = tensor.float() * tensor.abs().max()
    return scaled.clamp(-1.0, 1.0).to(dtype)
