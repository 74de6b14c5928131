"""Drafts of `fully_shard` calls: their parameters, their order, and their merging.

[Note: Inner groups come first]
`fully_shard` takes all parameters below its modules, but stops at modules that are already sharded. So a group is
sharded after all groups below any of its modules. Post-order ensures this for groups of one module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from compile_fsdp.errors import SharedParameterError
from compile_fsdp.torch_compat.fsdp import fsdp_state
from compile_fsdp.wrap.tree import ROOT, below, in_post_order


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
    position = {module: index for index, module in enumerate(in_post_order(root))}
    drafts = sorted(drafts, key=lambda draft: position[draft.modules[0]])
    ordered: dict[Draft, None] = {}

    def visit(draft: Draft) -> None:
        inside = below(draft.modules)
        for inner in drafts:
            if inner not in ordered and not inside.isdisjoint(inner.modules):
                visit(inner)
        ordered[draft] = None

    for draft in drafts:
        if draft not in ordered:
            visit(draft)
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
