"""A plan: the `fully_shard` calls and their group sizes, to inspect before the model is sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.passes.text import count
from compile_fsdp.wrap.groups import Draft
from compile_fsdp.wrap.layout import shard_count
from compile_fsdp.wrap.tree import names_of


@dataclass(frozen=True, slots=True)
class Group(Draft):
    """A call of `fully_shard`, and the parameters that are gathered and reduced together.

    Attributes:
        modules: The modules to shard; several modules share one parameter group.
        fqns: (modules,) FQN of each module, empty for the root.
        kwargs: Arguments of `fully_shard`: the root's arguments, overridden by the policy's.
        parameters: FQNs of the group's parameters in torch's order, each parameter once.
        numel: Number of elements in all parameters of the group, unsharded.
        bytes_per_rank: Bytes of the parameters' shards on each rank, padding included; equal on all ranks.
    """

    parameters: tuple[str, ...]
    numel: int
    bytes_per_rank: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The `fully_shard` calls that `apply` makes, in order; `print` shows them as a table.

    Attributes:
        root: The outermost module of the model.
        groups: The `fully_shard` calls, children before parents, the root last.
        full_precision: Modules that run in full precision even inside a low-precision model.
        warnings: Messages about choices that work but may not be intended.
    """

    root: nn.Module
    groups: tuple[Group, ...]
    full_precision: tuple[nn.Module, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        root = self.groups[-1]
        rows = [("FQN", "class", "parameters", "bytes per rank", "kwargs")]
        for group in self.groups:
            classes = ", ".join(type(module).__name__ for module in group.modules)
            adopted = {} if group is root else root.kwargs
            own = {key: value for key, value in group.kwargs.items() if key not in adopted or adopted[key] != value}
            kwargs = ", ".join(f"{key}={_show(value)}" for key, value in own.items())
            rows.append((group.name, classes, f"{group.numel:,}", f"{group.bytes_per_rank:,}", kwargs))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            f"{fqn:<{widths[0]}}  {cls:<{widths[1]}}  {numel:>{widths[2]}}  {size:>{widths[3]}}  {kwargs}".rstrip()
            for fqn, cls, numel, size, kwargs in rows
        ]
        numel, size = sum(group.numel for group in self.groups), sum(group.bytes_per_rank for group in self.groups)
        lines.append(
            f"{count(len(self.groups), 'group')} over {count(shard_count(root.kwargs), 'rank')}: "
            f"{numel:,} parameters, {size:,} bytes per rank"
        )
        if self.full_precision:
            names = names_of(self.root)
            lines.append(f"in full precision: {', '.join(names[module] for module in self.full_precision)}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def _show(value: object) -> str:
    """A short text for an argument, equal on every rank."""
    if isinstance(value, DeviceMesh):
        # Leave out the mesh's ranks, because a slice of a mesh contains different ranks on each rank.
        names = value.mesh_dim_names or ("",) * value.ndim
        dims = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, value.shape, strict=True))
        return f"{value.device_type}({dims})"
    if isinstance(value, Set):
        return f"{{{len(value)}}}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        given = [f"{field.name}={_show(own)}" for field, own in fields if own != field.default]
        return f"{type(value).__name__}({', '.join(given)})"
    return getattr(value, "__qualname__", None) or repr(value)
