"""Match the options of saved parameter groups with an optimizer's present groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_fsdp.state.names import NamedParameter
from compile_fsdp.state.verify import Differences

NAMES = ("params", "param_names")  # entries of a group that are not options

Group = Mapping[str, Any]


def options_of(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NAMES}


def match_groups(
    named: Sequence[Sequence[NamedParameter]],
    present: Sequence[Group],
    saved: Sequence[Group],
    differences: Differences,
) -> list[dict[str, Any]]:
    """Options of each present group, overwritten by the saved options of its parameters.

    The user may split or merge groups after the save if the parameters of each present group were saved with equal
    options. A group without parameters keeps its options, unless the saved group at its index is empty, too, and the
    numbers of saved and present groups are equal.

    Args:
        named: (present groups,) the parameters of each group.
        present: The optimizer's present groups.
        saved: The saved groups, whose `params` are FQNs.
        differences: Collects parameters whose saved options differ from the rest of their group.
    """
    by_name = {name: options_of(group) for group in saved for name in group["params"]}
    matched = []
    for number, (members, group) in enumerate(zip(named, present, strict=True)):
        found = [(member.fqn, by_name[name]) for member in members for name in member.names if name in by_name]
        if not members and len(saved) == len(present) and not saved[number]["params"]:
            found = [("", options_of(saved[number]))]
        options: dict[str, Any] = found[0][1] if found else {}
        for fqn, others in found[1:]:
            keys = sorted(key for key in {**options, **others} if not _same(options.get(key), others.get(key)))
            if keys:
                differences.other_options(f"{fqn} ({', '.join(keys)}; group {number})")
        matched.append({**options_of(group), **options})
    return matched


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    return type(left) is type(right) and bool(left == right)
