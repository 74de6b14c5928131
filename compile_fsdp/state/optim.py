"""`optim_state_dict` and `load_optim_state_dict`: optimizer state by parameter name, sharded or whole."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import StateError, StateMismatchError
from compile_fsdp.state.containers import leaves, map_leaves
from compile_fsdp.state.expected import describe
from compile_fsdp.state.groups import options_of
from compile_fsdp.state.layout import TensorSpec, collect_on_first, collect_whole, cut, distribute_from_first
from compile_fsdp.state.loading import LoadPlan, plan_load
from compile_fsdp.state.names import named_groups
from compile_fsdp.state.ranks import gather, is_first

OptimState = dict[str, Any]
"""`{"state": {fqn: {entry: value}}, "param_groups": [{"params": [fqn, ...], option: value}]}`"""


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    *,
    full: bool = False,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> OptimState:
    """The optimizer's state in the shape of `Optimizer.state_dict()`, with FQNs in place of parameter ids.

    Parameters come in the optimizer's order, which is the same on all ranks; a shared parameter comes once, under
    its first name; one without state (frozen, unused, or before the first step) is named in its group alone.

    Args:
        model: Holds all of the optimizer's parameters, managed ones and others. FQNs start at it.
        optim: Any optimizer; it is not changed, also before its first step.
        full: Whole plain tensors, which are copies, instead of the DTensors that the optimizer itself goes on
            working on. Collective: all ranks call it.
        cpu_offload: Put tensors on the CPU.
        rank0_only: With `full`: rank 0 alone gets the state, the others get `{}`. Tensors go there one after the
            other, and take no memory on the other ranks.
    Raises:
        StateError: `rank0_only` without `full`; state that belongs to no parameter.
        StateMismatchError: with `full`, ranks that do not have the same entries.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    if rank0_only and not full:
        raise StateError("expected full=True with rank0_only=True, got full=False; pass full=True, or neither")
    named = named_groups(model, optim)
    by_id = optim.state_dict()
    groups = [
        {"params": [each.fqn for each in parameters], **options_of(group)}
        for parameters, group in zip(named, by_id["param_groups"], strict=True)
    ]
    fqns = {
        index: each.fqn
        for parameters, group in zip(named, by_id["param_groups"], strict=True)
        for each, index in zip(parameters, group["params"], strict=True)
    }
    if others := by_id["state"].keys() - fqns.keys():
        raise StateError(
            f"expected optimizer state that belongs to parameters, got other entries: {sorted(map(str, others))}; "
            "save them apart"
        )
    state = {fqn: by_id["state"][index] for index, fqn in fqns.items() if by_id["state"].get(index)}
    if full:
        _require_same_structure(state)
    keep = not rank0_only or is_first()
    converted = {}
    for fqn, entries in state.items():
        entries = map_leaves(entries, lambda _, leaf: _convert(leaf, full, cpu_offload, rank0_only))
        if keep:
            converted[fqn] = entries
    return {"state": converted, "param_groups": groups} if keep else {}


def _convert(leaf: Any, full: bool, cpu_offload: bool, rank0_only: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if full and isinstance(leaf, DTensor):
        if rank0_only:
            return collect_on_first(leaf, cpu_offload)
        leaf = collect_whole(leaf)
    elif full:
        leaf = leaf.detach().clone() if not rank0_only or is_first() else None
    return leaf.cpu() if cpu_offload and leaf is not None else leaf


def load_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, state: OptimState, *, strict: bool = True
) -> None:
    """Load what `optim_state_dict` returned, in any of its forms, for any sharding, on any number of ranks.

    The optimizer's state is replaced; options of its groups that were saved are overwritten. Tensors are copied, so
    that the optimizer does not go on working on those of `state`, and keep their dtypes.

    Collective: all ranks call it. Where it raises, the optimizer is as it was, and all ranks raise the same error.

    Args:
        model: Holds all of the optimizer's parameters. FQNs start at it; any name of a shared parameter will do.
        optim: An optimizer with any state, or none yet.
        state: Sharded or full on every rank, or full on rank 0 with `{}` on the others. With parameter ids in place
            of FQNs, see `rekey_optim_state`.
        strict: Refuse parameters and entries that are missing or unexpected. Otherwise what is missing stays as it
            is, parameters that the optimizer does not have are left out, and entries that it does not make in its
            first step (it may make them later) are loaded.
    Raises:
        StateError: there is a state on some ranks only, or different ones.
        StateMismatchError: entries are missing, unexpected, or of another shape or dtype than the optimizer has.
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    is_partial = isinstance(state, dict) and bool(state) and not {"state", "param_groups"} <= state.keys()
    if not isinstance(state, dict) or is_partial:
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise StateError(
            f'expected an optimizer state with the keys "state" and "param_groups", got {got}; pass what '
            "optim_state_dict() returned"
        )
    from_first = _is_on_first_alone(state)
    outline: dict[str, Any] = {
        "param_groups": state.get("param_groups", []),
        "state": {fqn: map_leaves(entries, _outline) for fqn, entries in state.get("state", {}).items()},
    }
    if from_first:
        carried = [outline if is_first() else None]
        dist.broadcast_object_list(carried, src=0)
        assert carried[0] is not None
        outline = carried[0]
    plan = plan_load(model, optim, outline["param_groups"], outline["state"], strict, "the optimizer state")
    plan.apply(optim, {fqn: _place(plan, fqn, outline, state, from_first) for fqn in plan.sources})


def _outline(_: str, leaf: Any) -> Any:
    """Replace a tensor by a description with its whole shape and dtype."""
    return TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _place(plan: LoadPlan, fqn: str, outline: OptimState, state: OptimState, from_first: bool) -> Any:
    """One parameter's state with every tensor on the device and in the layout that the optimizer wants."""
    device = plan.parameters[fqn].device
    here = not from_first or is_first()
    sources = dict(leaves(state["state"][fqn])) if here else {}

    def place(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        target, source = plan.target(fqn, name, leaf), sources.get(name)
        if from_first:
            return distribute_from_first(source, target, device)
        assert source is not None
        if isinstance(source, DTensor):
            if TensorSpec.of(source) == target:
                return source.detach().clone().to(device)
            source = collect_whole(source)
        return cut(source, target, device)

    return map_leaves(outline["state"][fqn], place)


def _is_on_first_alone(state: OptimState) -> bool:
    """Whether rank 0 has a state and all other ranks `{}`; all ranks get the same answer.

    Raises:
        StateError: neither that, nor a state of the same structure on every rank.
    """
    tensors = [leaf for entries in state.get("state", {}).values() for _, leaf in leaves(entries)]
    sharded = any(isinstance(leaf, DTensor) for leaf in tensors)
    digests = gather((_digest(state.get("state", {})) if state else "", sharded))
    with_state = [rank for rank, (digest, _) in enumerate(digests) if digest]
    on_first_alone = with_state == [0] and len(digests) > 1
    if on_first_alone and not digests[0][1]:
        return True
    if len(with_state) < len(digests):
        kind = "a sharded one" if any(is_sharded for _, is_sharded in digests) else "one"
        raise StateError(
            "expected an optimizer state on every rank, or a full one on rank 0 and {} on the others, got "
            f"{kind} on ranks {with_state} of {len(digests)}; load it on all of them"
        )
    _refuse_differences(state.get("state", {}), [digest for digest, _ in digests])
    return False


def _require_same_structure(state: dict[str, Any]) -> None:
    _refuse_differences(state, gather(_digest(state)))


def _refuse_differences(state: dict[str, Any], digests: list[str]) -> None:
    """Raise, on all ranks, the names of entries that some ranks lack or have in another shape or dtype."""
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
