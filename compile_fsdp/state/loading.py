"""Decide where every entry of an optimizer state goes, and only then change the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from compile_fsdp.errors import StateError
from compile_fsdp.state.containers import leaves, map_leaves
from compile_fsdp.state.expected import Expected, Probe
from compile_fsdp.state.groups import Group, match_groups
from compile_fsdp.state.layout import TensorSpec
from compile_fsdp.state.names import NamedParameter, named_groups
from compile_fsdp.state.verify import Differences


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which saved state is loaded for which parameter. All names are those that the state was saved under."""

    sources: tuple[str, ...]
    """Names of the parameters with a saved state, in the order of the optimizer's groups."""
    parameters: Mapping[str, nn.Parameter]
    """The parameters of `sources`, by saved name."""
    expected: Mapping[str, Expected]
    """The entries that the optimizer keeps for each of `parameters`, by saved name."""
    kept: frozenset[nn.Parameter]
    """Parameters that the saved state does not name: their state stays as it is."""
    merge: bool
    """Whether entries that a saved state lacks stay as they are in the optimizer."""
    options: Sequence[Mapping[str, Any]]
    """The options that each of the optimizer's groups will have."""

    def target(self, fqn: str, entry: str, saved: TensorSpec) -> TensorSpec:
        """The layout of a tensor once it is loaded.

        It is the layout that the optimizer would choose. If that is not known, it is the parameter's layout if shapes
        are equal, replicated over the parameter's mesh if they differ, and a plain tensor if there are no dims or mesh.
        """
        known = self.expected[fqn].entries.get(entry)
        if known is not None:
            return TensorSpec(saved.shape, saved.dtype, known.mesh, known.placements)
        parameter = self.parameters[fqn]
        if not isinstance(parameter, DTensor) or not saved.shape:
            return TensorSpec(saved.shape, saved.dtype)
        placements = (
            tuple(parameter.placements)
            if saved.shape == parameter.shape
            else (Replicate(),) * parameter.device_mesh.ndim
        )
        return TensorSpec(saved.shape, saved.dtype, parameter.device_mesh, placements)

    def apply(self, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Pass the state to the optimizer's own `load_state_dict`; if that raises, the optimizer is unchanged.

        Args:
            optim: The optimizer that this plan was made for.
            state: State by saved name, with tensors laid out as `target` says; the optimizer keeps these tensors.
        """
        ids = {
            parameter: index
            for index, parameter in enumerate(p for group in optim.param_groups for p in group["params"])
        }
        loaded = {}
        for name in self.sources:
            present = optim.state.get(self.parameters[name], {}) if self.merge else {}
            loaded[ids[self.parameters[name]]] = {**present, **state[name]}
        kept = {ids[parameter]: optim.state[parameter] for parameter in self.kept if parameter in optim.state}
        groups = []
        for group, options in zip(optim.param_groups, self.options, strict=True):
            groups.append({**options, "params": [ids[parameter] for parameter in group["params"]]})
        before = optim.state, optim.param_groups
        try:
            optim.load_state_dict({"state": {**kept, **loaded}, "param_groups": groups})
        except BaseException:
            optim.state, optim.param_groups = before
            raise
        for name in self.sources:
            parameter = self.parameters[name]
            optim.state[parameter] = _undo_casts(optim.state[parameter], state[name])


def plan_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    groups: Sequence[Group],
    outline: Mapping[str, Any],
    strict: bool,
    what: str,
    differences: Differences | None = None,
) -> LoadPlan:
    """Match a saved state with the optimizer, and refuse it where it does not fit. Collective.

    Args:
        model: The model that holds the optimizer's parameters.
        optim: The optimizer, which is not changed here.
        groups: The saved groups, whose `params` are FQNs.
        outline: The saved state by FQN, with a `TensorSpec` in place of every tensor. Equal on all ranks.
        strict: Whether missing and unexpected entries are refused.
        what: Name of the state in the error message.
        differences: Differences found so far, to be raised together with the ones found here.
    Raises:
        StateError: the saved groups hold parameter ids.
        StateMismatchError: the state does not fit; all ranks raise the same error.
    """
    differences = Differences(strict) if differences is None else differences
    if any(not isinstance(name, str) for group in groups for name in group["params"]):
        raise StateError(
            "expected parameter groups that name their parameters, got parameter ids; "
            'convert them with rekey_optim_state(state, model, to="fqn")'
        )
    named = named_groups(model, optim)
    options = match_groups(named, optim.param_groups, groups, differences)
    saved_names = dict.fromkeys([*(name for group in groups for name in group["params"]), *outline])
    probe = Probe(optim)
    parameters: dict[str, nn.Parameter] = {}
    expected: dict[str, Expected] = {}
    kept = set()
    matched = set()
    for number, members in enumerate(named):
        for member in members:
            name = _saved_name(member, saved_names)
            if name is None:
                differences.missing(member.fqn)
                kept.add(member.parameter)
                continue
            matched.add(name)
            if name in outline:
                parameters[name] = member.parameter
                expected[name] = probe.expected(member.parameter, number, options[number])
                got = {entry: _spec(leaf) for entry, leaf in leaves(outline[name])}
                differences.compare_state(member.fqn, expected[name], got)
    for name in saved_names.keys() - matched:
        differences.unexpected(str(name))
    differences.raise_together(what)
    return LoadPlan(tuple(parameters), parameters, expected, frozenset(kept), not strict, options)


def _saved_name(member: NamedParameter, saved: Mapping[str, None]) -> str | None:
    """The name under which a parameter was saved, None if it was not saved."""
    return next((name for name in member.names if name in saved), None)


def _spec(leaf: Any) -> TensorSpec | None:
    return leaf if isinstance(leaf, TensorSpec) else None


def _undo_casts(loaded: dict[Any, Any], wanted: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of `loaded` in which leaves that `Optimizer.load_state_dict` has changed come from `wanted`.

    `Optimizer.load_state_dict` casts tensors to the parameter's dtype, counters included, and corrupts strings.
    """
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
