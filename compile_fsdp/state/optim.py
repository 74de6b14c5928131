"""`optim_state_dict` and `load_optim_state_dict`: sharded or full optimizer state by parameter name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from compile_fsdp.errors import StateError, StateMismatchError
from compile_fsdp.state.containers import leaves, map_leaves
from compile_fsdp.state.expected import Differences, describe
from compile_fsdp.state.layout import TensorSpec, collect_on_first, collect_whole, cut, distribute_from_first, plain
from compile_fsdp.state.loading import LoadPlan, plan_load
from compile_fsdp.state.names import named_groups, options_of
from compile_fsdp.state.ranks import broadcast, gather, is_first

# {"state": {fqn: {entry: value}}, "param_groups": [{"params": [fqn, ...], option: value}]}
OptimState = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: Optimizer, *, full: bool = False, cpu_offload: bool = False, rank0_only: bool = False
) -> OptimState:
    """The optimizer's state in the form of `Optimizer.state_dict()`, with FQNs in place of parameter ids.

    Parameters are in the optimizer's order, which is equal on all ranks. A shared parameter appears once, under its
    first name. A parameter without state (frozen, unused, or before the first step) appears in its group only.

    Args:
        model: A module that holds all of the optimizer's parameters, sharded or not; FQNs start at it.
        optim: Any optimizer, even before its first step; it does not change.
        full: Whether to return copies as whole plain tensors, instead of the optimizer's DTensors. Collective if True.
        cpu_offload: Whether to return tensors on the CPU.
        rank0_only: Whether only rank 0 gets the full state, and all other ranks get `{}`; requires `full`. Tensors are
            sent to rank 0 in sequence, and need no additional memory on the sending ranks.
    Raises:
        StateError: `rank0_only` is set without `full`, or some state belongs to no parameter.
        StateMismatchError: `full` is set, and entries differ between ranks.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    if rank0_only and not full:
        raise StateError("expected full=True with rank0_only=True, got full=False; pass full=True, or neither")
    named = named_groups(model, optim)
    by_id = optim.state_dict()
    groups: list[dict[str, Any]] = []
    fqns: dict[Any, str] = {}
    for parameters, group in zip(named, by_id["param_groups"], strict=True):
        names = [each.fqn for each in parameters]
        groups.append({"params": names, **options_of(group)})
        fqns.update(zip(group["params"], names, strict=True))
    if others := by_id["state"].keys() - fqns.keys():
        raise StateError(
            f"expected optimizer state that belongs to parameters, got other entries: {sorted(map(str, others))}; "
            "save them apart"
        )
    state = {fqn: by_id["state"][index] for index, fqn in fqns.items() if by_id["state"].get(index)}
    if full:
        _refuse_differences(state, gather(_digest(state)))

    def convert(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if full and isinstance(leaf, DTensor):
            if rank0_only:
                return collect_on_first(leaf, cpu_offload)
            leaf = collect_whole(leaf)
        elif full:
            leaf = plain(leaf.detach()).clone() if not rank0_only or is_first() else None
        return leaf.cpu() if cpu_offload and leaf is not None else leaf

    converted = {fqn: map_leaves(entries, convert) for fqn, entries in state.items()}
    return {"state": converted, "param_groups": groups} if not rank0_only or is_first() else {}


def load_optim_state_dict(model: nn.Module, optim: Optimizer, state: OptimState, *, strict: bool = True) -> None:
    """Load a sharded or full state from `optim_state_dict`, under any sharding and on any number of ranks.

    The state replaces the optimizer's state, and saved group options overwrite the optimizer's options. Tensors keep
    their dtypes, and are copied so that the optimizer does not change `state`. Collective: all ranks call it. If it
    raises, it raises on all ranks with equal text, and the optimizer is unchanged.

    Args:
        model: A module with all the optimizer's parameters; FQNs start at it. Any FQN of a shared parameter works.
        optim: An optimizer, with or without state.
        state: A sharded or full state on every rank, or a full state on rank 0 and `{}` on every other rank. Convert a
            state with parameter ids with `rekey_optim_state` first.
        strict: Whether to refuse missing and unexpected parameters and entries. If False, the optimizer keeps its state
            for missing parameters and entries, and parameters unknown to the optimizer are skipped. Entries that the
            optimizer does not make in its first step (but may make later) are loaded.
    Raises:
        StateError: `state` does not have this form, or only some ranks have a state.
        StateMismatchError: entries are missing, unexpected, of wrong shape or dtype, or differ between ranks.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    if not isinstance(state, dict) or (state and not {"state", "param_groups"} <= state.keys()):
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise StateError(
            f'expected an optimizer state with the keys "state" and "param_groups", got {got}; pass what '
            "optim_state_dict() returned"
        )
    from_first = _is_on_first_alone(state)
    groups, saved = state.get("param_groups", []), state.get("state", {})
    outline = {fqn: map_leaves(entries, _outline) for fqn, entries in saved.items()}
    if from_first:
        groups, outline = broadcast((groups, outline))
    plan = plan_load(model, optim, groups, outline, Differences("the optimizer state", strict))
    plan.apply(optim, {fqn: _place(plan, fqn, outline[fqn], saved.get(fqn, {}), from_first) for fqn in plan.parameters})


def _outline(_: str, leaf: Any) -> Any:
    """Replace a tensor by a `TensorSpec` with the shape and dtype of the whole tensor."""
    return TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@torch.no_grad()
def _place(plan: LoadPlan, fqn: str, outline: Any, saved: Any, from_first: bool) -> Any:
    """Build a parameter's state, with every tensor on the parameter's device and in the layout of the plan."""
    device = plan.parameters[fqn].device
    sources = dict(leaves(saved))

    def place(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        target, source = plan.target(fqn, name, leaf), sources.get(name)
        room = plan.expected[fqn].rooms.get(name)
        if from_first:
            placed = distribute_from_first(None if source is None else plain(source), target, device)
        else:
            assert source is not None
            if TensorSpec.of(source) == target and room is not None:
                placed = source
            elif TensorSpec.of(source) == target and isinstance(source, DTensor):
                placed = plain(source.detach()).clone().to(device)
            else:
                placed = cut(collect_whole(source) if isinstance(source, DTensor) else plain(source), target, device)
        return placed if room is None else room.copy_(placed)

    return map_leaves(outline, place)


def _is_on_first_alone(state: OptimState) -> bool:
    """Whether only rank 0 has a state, and it is a full state; raises on all ranks if states differ otherwise."""
    entries = state.get("state", {})
    is_sharded = any(isinstance(leaf, DTensor) for _, leaf in leaves(entries))
    digests, sharded = zip(*gather((_digest(entries) if state else "", is_sharded)), strict=True)
    with_state = [rank for rank, digest in enumerate(digests) if digest]
    if with_state == [0] and len(digests) > 1 and not sharded[0]:
        return True
    if len(with_state) < len(digests):
        raise StateError(
            "expected an optimizer state on every rank, or a full one on rank 0 and {} on the others, got "
            f"{'a sharded one' if any(sharded) else 'one'} on ranks {with_state} of {len(digests)}; load it on all of "
            "them"
        )
    _refuse_differences(entries, digests)
    return False


def _refuse_differences(state: dict[str, Any], digests: Sequence[str]) -> None:
    """Raise on all ranks if some ranks lack an entry or its shape or dtype differs."""
    if len(set(digests)) == 1:
        return
    listed = gather(_list_entries(state))
    common = set.intersection(*map(set, listed))
    different = sorted({text for texts in listed for text in texts} - common)
    raise StateMismatchError(
        "expected the same optimizer state entries on every rank, got some on a part of the ranks alone: "
        f"{', '.join(different)}; give every rank gradients for the same parameters"
    )


def _list_entries(state: dict[str, Any]) -> list[str]:
    return [
        f"{fqn}: {name} {'' if spec is None else spec}".rstrip()
        for fqn, entries in state.items()
        for name, spec in describe(entries).items()
    ]


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256("\n".join(_list_entries(state)).encode()).hexdigest()
