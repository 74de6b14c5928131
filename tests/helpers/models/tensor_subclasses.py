"""Tensor subclasses with all-gather extensions, like low-precision weights in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# Ops that return the subclass: all ops of sharding on a parameter, and of an optimizer on its shards.
_aten = torch.ops.aten
_KEEPING = {
    *(_aten.alias.default, _aten.as_strided.default, _aten.clone.default, _aten.copy_.default, _aten.detach.default),
    _aten.empty_like.default,
    *(_aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default, _aten._to_copy.default),
}


class LowPrecision(torch.Tensor):
    """A full-precision weight gathered in low precision; ops on it return plain tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> LowPrecision:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> LowPrecision:
        return cls(inner["inner"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result) if func in _KEEPING else result


def _fill(out: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value)


class Float8Weight(LowPrecision):
    """Gathered in float8 with one scale as metadata; `fsdp_pre_all_gather` takes one argument."""

    SCALE = 8.0

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return ((self.inner * self.SCALE).to(torch.float8_e4m3fn),), (self.SCALE,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        value = gathered[0].to(dtype) / metadata[0]
        if out is not None:
            _fill(out, value)
            return None
        return value, (value,)


class Int8Weight(LowPrecision):
    """Gathered as int8 rows and float32 scales per row; `fsdp_pre_all_gather` takes five arguments."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        # All ranks send as many rows as rank 0, which has the most.
        rows = -(-outer_size[0] // mesh.size())
        missing = rows - self.inner.shape[0]
        inner = self.inner if missing == 0 else torch.cat([self.inner, self.inner.new_zeros(missing, *outer_size[1:])])
        scale = inner.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127.0
        return ((inner / scale).round().to(torch.int8), scale.expand(inner.shape).contiguous()), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        data, scale = gathered
        value = data.to(dtype) * scale.to(dtype)
        if out is not None:
            _fill(out, value[: out.shape[0]])
            return None
        return value, (value,)


class Int8Rows(torch.Tensor):
    """The unsharded `Int8RowsWeight`: int8 values, a scale per value, and one factor."""

    values: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> Int8Rows:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> None:
        self.values, self.scale, self.factor = values, scale, factor

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["values", "scale", "factor"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> Int8Rows:
        return cls(inner["values"], inner["scale"], inner["factor"], dtype)

    def __repr__(self) -> str:
        return f"Int8Rows({self.values}, {self.scale}, {self.factor})"

    def _plain(self) -> torch.Tensor:
        return self.values.to(self.dtype) * self.scale.to(self.dtype) * self.factor.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.as_strided.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            own = args[0]
            return cls(func(own.values, *args[1:]), func(own.scale, *args[1:]), own.factor, own.dtype)
        return func(*pytree.tree_map_only(cls, cls._plain, args), **pytree.tree_map_only(cls, cls._plain, kwargs or {}))


class Int8RowsWeight(Int8Weight):
    """Gathered like `Int8Weight`, but `Int8Rows` when unsharded; its factor is metadata."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        inputs, _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return inputs, (torch.full((), 1.5, device=self.device),)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scale = gathered
        if out is not None:
            out.factor = metadata[0]
            return None
        return Int8Rows(values, scale, metadata[0], dtype), (values, scale)


def use(modules: list[nn.Module], cls: type[LowPrecision]) -> None:
    """Replace all weights of linear layers in the modules by the subclass."""
    for module in [each for above in modules for each in above.modules()]:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(cls(module.weight.detach()))
