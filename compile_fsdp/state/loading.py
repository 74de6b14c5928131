"""Plan the load of an optimizer state completely before the optimizer changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from compile_fsdp.errors import StateError
from compile_fsdp.state.containers import leaves, map_leaves
from compile_fsdp.state.expected import OTHER_OPTIONS, Differences, Expected, Probe, unwrapped
from compile_fsdp.state.layout import TensorSpec
from compile_fsdp.state.names import NamedParameter, named_groups, options_of

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The saved state that is loaded for each parameter. All names are names in the saved state."""

    parameters: Mapping[str, nn.Parameter]  # those with a saved state, in the order of the optimizer's groups
    expected: Mapping[str, Expected]  # the entries that the optimizer keeps for each of `parameters`
    kept: frozenset[nn.Parameter]  # parameters that the saved state does not name: their state stays as it is
    merge: bool  # whether entries that a saved state lacks stay as they are in the optimizer
    options: Sequence[Group]  # the options that each of the optimizer's groups will have

    def target(self, fqn: str, entry: str, saved: TensorSpec) -> TensorSpec:
        """The layout of a loaded tensor: the optimizer's choice, or if that is unknown, one that follows the shape."""
        known = self.expected[fqn].entries.get(entry)
        if known is not None:
            return TensorSpec(saved.shape, saved.dtype, known.mesh, known.placements)
        parameter = self.parameters[fqn]
        if not isinstance(parameter, DTensor) or not saved.shape:
            return TensorSpec(saved.shape, saved.dtype)
        mesh = parameter.device_mesh
        placements = tuple(parameter.placements) if saved.shape == parameter.shape else (Replicate(),) * mesh.ndim
        return TensorSpec(saved.shape, saved.dtype, mesh, placements)

    def apply(self, optim: Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state`, whose tensors have the layouts of `target`; if this raises, the optimizer is unchanged."""
        optim = unwrapped(optim)
        every = chain.from_iterable(group["params"] for group in optim.param_groups)
        ids = {parameter: index for index, parameter in enumerate(every)}
        wanted = {parameter: optim.state[parameter] for parameter in self.kept if parameter in optim.state}
        for name, parameter in self.parameters.items():
            present = optim.state.get(parameter, {}) if self.merge else {}
            wanted[parameter] = {**present, **state[name]}
        loaded = {ids[parameter]: entries for parameter, entries in wanted.items()}
        groups = [
            {**options, "params": [ids[parameter] for parameter in group["params"]]}
            for group, options in zip(optim.param_groups, self.options, strict=True)
        ]
        with unchanged_on_error(optim):
            optim.load_state_dict({"state": loaded, "param_groups": groups})
        for parameter, entries in wanted.items():
            optim.state[parameter] = _undo_casts(optim.state[parameter], entries)


@contextmanager
def unchanged_on_error(optim: Optimizer) -> Iterator[None]:
    """Undo the block's `Optimizer.load_state_dict` if the block raises."""
    optim = unwrapped(optim)
    before = optim.state, optim.param_groups
    try:
        yield
    except BaseException:
        optim.state, optim.param_groups = before
        raise


def plan_load(
    model: nn.Module, optim: Optimizer, groups: Sequence[Group], outline: Mapping[str, Any], differences: Differences
) -> LoadPlan:
    """Match a saved state with the optimizer, and refuse a state that does not fit. Collective.

    `outline` is the saved state by FQN, with a `TensorSpec` in place of every tensor; it is equal on all ranks.
    `differences` may hold earlier differences, which are raised together with new ones.
    """
    in_groups = list(chain.from_iterable(group["params"] for group in groups))
    if any(not isinstance(name, str) for name in in_groups):
        raise StateError(
            "expected parameter groups that name their parameters, got parameter ids; "
            'convert them with rekey_optim_state(state, model, to="fqn")'
        )
    named = named_groups(model, optim)
    options = _match_groups(named, optim.param_groups, groups, differences)
    saved_names = {*in_groups, *outline}
    probe = Probe(unwrapped(optim))
    parameters: dict[str, nn.Parameter] = {}
    expected: dict[str, Expected] = {}
    kept = set()
    matched = set()
    for number, members in enumerate(named):
        for member in members:
            name = next((name for name in member.names if name in saved_names), None)
            if name is None:
                differences.add("missing", member.fqn)
                kept.add(member.parameter)
                continue
            matched.add(name)
            if name in outline:
                parameters[name] = member.parameter
                expected[name] = probe.expected(member.parameter, number, options[number])
                got = {key: leaf if isinstance(leaf, TensorSpec) else None for key, leaf in leaves(outline[name])}
                differences.compare_state(member.fqn, expected[name], got)
    differences.add_foreign(map(str, saved_names - matched))
    differences.raise_together()
    return LoadPlan(parameters, expected, frozenset(kept), not differences.strict, options)


def _match_groups(
    named: Sequence[Sequence[NamedParameter]],
    present: Sequence[Group],
    saved: Sequence[Group],
    differences: Differences,
) -> list[dict[str, Any]]:
    """Options of each present group, overwritten by the saved options of its parameters.

    The user may split or merge groups after the save if the parameters of each present group were saved with equal
    options. An empty group takes the options of an empty saved group at its index, if there are as many saved groups.
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
                differences.add(OTHER_OPTIONS, f"{fqn} ({', '.join(keys)}; group {number})")
        matched.append({**options_of(group), **options})
    return matched


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left.cpu(), right.cpu())
    return type(left) is type(right) and bool(left == right)


def _undo_casts(loaded: dict[Any, Any], wanted: dict[Any, Any]) -> dict[Any, Any]:
    """Restore tensors that `Optimizer.load_state_dict` casts to the parameter's dtype, and strings that it corrupts."""
    originals = dict(leaves(wanted))

    def pick(name: str, leaf: Any) -> Any:
        original = originals.get(name)
        if isinstance(original, str):
            return original
        if isinstance(leaf, Tensor) and isinstance(original, Tensor) and leaf.dtype != original.dtype:
            return original.to(leaf.device)
        return leaf

    undone: dict[Any, Any] = map_leaves(loaded, pick)
    return undone
