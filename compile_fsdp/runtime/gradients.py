"""Unsharded gradients of a group's parameters, and their dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from compile_fsdp.runtime.attached import accumulated_gradient, set_accumulated_gradient
from compile_fsdp.runtime.dtensor_parameters import as_dtensor
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.fsdp import HAS_GRAD_DTYPES, FSDPParam, FSDPParamGroup, unsharded_spec


def take_gradient(traced: TraceableParam, dtype: torch.dtype | None, fills: bool) -> torch.Tensor | None:
    """Take the sum, a plain tensor, of this backward's gradient, cast to `dtype`, and of earlier microbatches.

    If there is none, `fills` makes it zeros, because other ranks may use the parameter.
    """
    param = traced.fsdp_param
    grad, traced.unsharded_param.grad = traced.unsharded_param.grad, None
    if grad is not None and dtype is not None:
        grad = grad.to(dtype)
    earlier = accumulated_gradient(param)  # in the reduce dtype
    if earlier is not None:
        set_accumulated_gradient(param, None)
    elif param.is_dtensor or traced.parts is not None:
        earlier, param._unsharded_param.grad = param._unsharded_param.grad, None
    if earlier is None:
        unsharded = traced.unsharded_param
        if grad is None and fills and unsharded.requires_grad:
            return torch.zeros(traced.layout.size, dtype=dtype or unsharded.dtype, device=unsharded.device)
        return grad
    if isinstance(earlier, DTensor):
        earlier = earlier.to_local()
    return earlier if grad is None else earlier + grad


@at_run_time
def hand_back_gradient(traced: TraceableParam) -> None:
    """Move an unreduced gradient to torch's unsharded parameter, if graphs read a different tensor."""
    param = traced.fsdp_param
    grad, unsharded = traced.unsharded_param.grad, param._unsharded_param
    if unsharded is traced.unsharded_param or grad is None:
        return
    traced.unsharded_param.grad = None
    if param.is_dtensor:
        grad = as_dtensor(grad, unsharded_spec(param))
    unsharded.grad = grad if unsharded.grad is None else unsharded.grad + grad


@at_run_time
def describe_partial_output(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
    """Set the layout of the partial reduce output, which eager FSDP2 reads since 2.15. (2.15.0)"""
    if not HAS_GRAD_DTYPES:
        return
    layout: dict[FSDPParam, tuple[int, int]] = group._partial_reduce_output_layout  # type: ignore[attr-defined]
    layout.clear()
    offset = 0
    for param in params:
        numel = param.padded_sharded_param_size.numel()
        layout[param] = (offset, numel)
        offset += numel


@at_run_time
def free_gradient_dtypes(group: FSDPParamGroup) -> None:
    """Let a compiled backward accumulate gradients in the dtype it computes them in. (2.15.0)

    A gradient of earlier microbatches that is not in the parameter's dtype is kept separately, because a graph accepts
    no parameter with such a gradient.
    """
    for param in _with_gradient_dtype(group):
        unsharded, earlier = param._unsharded_param, None
        if unsharded.grad is not None and unsharded.grad.dtype != unsharded.dtype:
            earlier, unsharded.grad = unsharded.grad, None
        set_accumulated_gradient(param, earlier)
        unsharded.grad_dtype = None


@at_run_time
def fix_gradient_dtypes(group: FSDPParamGroup) -> None:
    """Return unsharded gradients to the dtype in which eager FSDP2 accumulates since 2.15. (2.15.0)"""
    for param in _with_gradient_dtype(group):
        unsharded, dtype = param._unsharded_param, param.unsharded_grad_dtype  # type: ignore[attr-defined]
        earlier, grad = accumulated_gradient(param), unsharded.grad
        if earlier is not None:
            grad = earlier if grad is None else earlier + grad
        set_accumulated_gradient(param, None)
        unsharded.grad = None
        unsharded.grad_dtype = dtype
        unsharded.grad = grad if grad is None or dtype is None else grad.to(dtype)


@at_run_time
def _with_gradient_dtype(group: FSDPParamGroup) -> list[FSDPParam]:
    return [param for param in group.fsdp_params if HAS_GRAD_DTYPES and param.sharded_param.requires_grad]
