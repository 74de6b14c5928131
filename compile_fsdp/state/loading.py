"""Plan the load of an optimizer state completely before the optimizer changes."""

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
    """The saved state that is loaded for each parameter. All names are names in the saved state."""

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
        """The layout of a loaded tensor.

        This is the layout that the optimizer would choose. If that is unknown, the tensor gets the parameter's layout
        for equal shapes, and is replicated over the parameter's mesh for different shapes. It is a plain tensor if it
        has no dims or the parameter has no mesh.
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
        """Load the state with the optimizer's `load_state_dict`; if that raises, the optimizer is unchanged.

        Args:
            optim: The optimizer that this plan was made for.
            state: State by saved name, whose tensors have the layouts of `target`; the optimizer keeps these tensors.
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
    """Match a saved state with the optimizer, and refuse a state that does not fit. Collective.

    Args:
        model: The model that holds the optimizer's parameters.
        optim: The optimizer, which does not change.
        groups: The saved groups, whose `params` are FQNs.
        outline: The saved state by FQN, with a `TensorSpec` in place of every tensor. Equal on all ranks.
        strict: Whether missing and unexpected entries are refused.
        what: Name of the state in the error message.
        differences: Differences found so far, raised together with new differences; None for no earlier differences.
    Raises:
        StateError: the saved groups hold parameter ids.
        StateMismatchError: the state does not fit; raised on all ranks with equal text.
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
    """The name under which a parameter was saved; None if it was not saved."""
    return next((name for name in member.names if name in saved), None)


def _spec(leaf: Any) -> TensorSpec | None:
    return leaf if isinstance(leaf, TensorSpec) else None


def _undo_casts(loaded: dict[Any, Any], wanted: dict[Any, Any]) -> dict[Any, Any]:
    """Copy `loaded`, with leaves that `Optimizer.load_state_dict` has changed taken from `wanted`.

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
