"""Plans of `fully_shard` calls: drafts with their parameters, order and merging, and groups with sizes to inspect.

[Note: Inner groups come first]
`fully_shard` takes all parameters below its modules, but stops at modules that are already sharded. So a group is
sharded after all groups below any of its modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.errors import SharedParameterError
from compile_fsdp.passes.text import count
from compile_fsdp.torch_compat.fsdp import fsdp_state
from compile_fsdp.wrap.layout import shard_count
from compile_fsdp.wrap.tree import ROOT, below, names_of


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A call of `fully_shard`: its arguments and its modules, which do not contain each other."""

    modules: tuple[nn.Module, ...]
    fqns: tuple[str, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the group: `layers.0`, `[embedding, head]` or `the root`."""
        names = [fqn or ROOT for fqn in self.fqns]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


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


def _collect(draft: Draft, borders: Set[nn.Module]) -> list[nn.Parameter]:
    """The parameters that `fully_shard` takes for a draft, in torch's order, not below `borders`, each once."""
    ignored = set(draft.kwargs.get("ignored_params") or ())
    found: dict[nn.Parameter, None] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen and child not in borders and fsdp_state(child) is None:
                visit(child)
        found.update(dict.fromkeys(each for each in module.parameters(recurse=False) if each not in ignored))

    for module in draft.modules:
        visit(module)
    return list(found)


def collect_all(drafts: Sequence[Draft]) -> dict[Draft, list[nn.Parameter]]:
    borders = {module for draft in drafts for module in draft.modules}
    return {draft: _collect(draft, borders) for draft in drafts}


def find_shared(drafts: Sequence[Draft]) -> dict[nn.Parameter, list[Draft]]:
    """Map each parameter that several drafts take to these drafts."""
    takers: dict[nn.Parameter, list[Draft]] = {}
    for draft, parameters in collect_all(drafts).items():
        for parameter in parameters:
            takers.setdefault(parameter, []).append(draft)
    return {parameter: taking for parameter, taking in takers.items() if len(taking) > 1}


def in_order(root: nn.Module, drafts: Sequence[Draft]) -> list[Draft]:
    """Sort drafts into sharding order. See [Note: Inner groups come first]."""
    position = {module: index for index, module in enumerate(root.modules())}
    drafts = sorted(drafts, key=lambda draft: position[draft.modules[0]])
    ordered: dict[Draft, None] = {}

    def visit(draft: Draft) -> None:
        inside = below(draft.modules)
        for inner in drafts:
            if inner not in ordered and not inside.isdisjoint(inner.modules):
                visit(inner)
        ordered[draft] = None

    visit(drafts[0])  # the root's, which contains all others
    return list(ordered)


def merge_shared(root: nn.Module, drafts: Sequence[Draft]) -> list[Draft]:
    """Merge drafts that share parameters into drafts of their outermost modules; raises if their arguments differ."""
    drafts = list(drafts)
    while (pair := _find_pair(drafts)) is not None:
        drafts = [draft for draft in drafts if draft not in pair] + [_merge(root, *pair)]
    return drafts


def _find_pair(drafts: Sequence[Draft]) -> tuple[Draft, Draft] | None:
    for first, second, *_ in find_shared(drafts).values():
        return first, second
    # Two groups of several modules may each contain a module of the other, so neither can be sharded first.
    several = [(draft, below(draft.modules)) for draft in drafts if len(draft.modules) > 1]
    for first, inside_first in several:
        for second, inside_second in several:
            if not inside_first.isdisjoint(second.modules) and not inside_second.isdisjoint(first.modules):
                return first, second
    return None


def _merge(root: nn.Module, first: Draft, second: Draft) -> Draft:
    keys = sorted({*first.kwargs, *second.kwargs})
    given = {key: [draft.kwargs.get(key, "not given") for draft in (first, second)] for key in keys}
    if differing := {key: values for key, values in given.items() if values[0] != values[1]}:
        raise SharedParameterError(
            f"expected the same arguments for {first.name} and {second.name}, which share parameters and can only be "
            f"one group, got {differing}; give both the same arguments, or leave one of them out"
        )
    outermost = {*first.modules, *second.modules} - below({*first.modules, *second.modules})
    fqns = {module: fqn for fqn, module in root.named_modules() if module in outermost}
    return Draft(tuple(fqns), tuple(fqns.values()), first.kwargs)


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
