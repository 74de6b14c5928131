"""`rekey_optim_state`: convert optimizer state between the parameter ids of `Optimizer.state_dict()` and FQNs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from compile_fsdp.errors import RekeyError
from compile_fsdp.state.containers import leaves
from compile_fsdp.state.names import NamedParameter, named_groups, named_parameters, options_of
from compile_fsdp.state.optim import OptimState


def rekey_optim_state(
    state: Mapping[str, Any], model: nn.Module, to: Literal["id", "fqn"], *, optim: Optimizer | None = None
) -> OptimState:
    """Rename the parameters of an optimizer state; tensors are neither copied nor changed. Not collective.

    Ids number the parameters of all groups in order. Their names come from the first of these that is available:
    `optim`; the groups' `param_names`, which an optimizer over named parameters has; and, for a single group, the order
    of `model.named_parameters()`, with or without the frozen parameters. A state that has names keeps them.

    Args:
        state: A state from `Optimizer.state_dict()` or `optim_state_dict()`.
        model: The model, sharded or not, because FQNs do not depend on sharding.
        to: "fqn" for a state for `load_optim_state_dict`, "id" for a state for `Optimizer.load_state_dict`.
        optim: An optimizer over parameters of `model`, with the groups of the state. It is needed to name the ids of
            several groups without `param_names`. With to="id", ids follow its order.
    Returns:
        A renamed state without `param_names`, in new dicts.
    Raises:
        RekeyError: the names of the ids cannot be determined, or names or shapes do not match the model.
    """
    if to == "fqn":
        return _to_fqns(state, model, optim)
    if to == "id":
        return _to_ids(state, model, optim)
    raise RekeyError(f'expected to="id" or to="fqn", got {to!r}')


def _to_fqns(state: Mapping[str, Any], model: nn.Module, optim: Optimizer | None) -> OptimState:
    groups = state["param_groups"]
    ids = list(chain.from_iterable(group["params"] for group in groups))
    fqns = dict(zip(ids, _names_of_ids(groups, model, optim), strict=True))
    if foreign := [str(key) for key in state["state"] if key not in fqns]:
        raise RekeyError(f"expected state of the groups' parameters, got state of others: {', '.join(foreign)}")
    _check_shapes(state["state"], fqns, model)
    return {
        "state": {fqns[key]: state["state"][key] for key in ids if key in state["state"]},
        "param_groups": [{"params": [fqns[key] for key in group["params"]], **options_of(group)} for group in groups],
    }


def _names_of_ids(groups: Sequence[Mapping[str, Any]], model: nn.Module, optim: Optimizer | None) -> list[str]:
    every = named_parameters(model)
    ids = list(chain.from_iterable(group["params"] for group in groups))
    if ids and all(isinstance(each, str) for each in ids):
        return _known_names(ids, every, model)
    sizes = [len(group["params"]) for group in groups]
    if optim is not None:
        named = named_groups(model, optim)
        if [len(members) for members in named] != sizes:
            raise RekeyError(
                f"expected optim to have groups of {sizes} parameters as the state has, got groups of "
                f"{[len(members) for members in named]}; make it as the optimizer that the state is from"
            )
        return [member.fqn for member in chain.from_iterable(named)]
    if all("param_names" in group for group in groups):
        return _known_names(chain.from_iterable(group["param_names"] for group in groups), every, model)
    if len(groups) > 1:
        raise RekeyError(
            f"expected one parameter group, or groups with param_names, got {len(groups)} groups without; "
            "pass optim=, an optimizer with the same groups"
        )
    trainable = [member for member in every if member.parameter.requires_grad]
    for members in (every, trainable):
        if [len(members)] == sizes:
            return [member.fqn for member in members]
    raise RekeyError(
        f"expected ids for all {len(every)} parameters of {type(model).__name__}, or for the {len(trainable)} "
        f"trainable ones, got {sum(sizes)}; pass optim=, an optimizer over the same parameters"
    )


def _known_names(names: Iterable[str], every: Sequence[NamedParameter], model: nn.Module) -> list[str]:
    """Map an optimizer's parameter names, which may include names of wrapper modules, to FQNs."""
    first = {name: member.fqn for member in every for name in member.names}
    found: list[str] = []
    foreign: list[str] = []
    for name in names:
        unwrapped = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        candidates = (name, unwrapped, unwrapped.removeprefix("module."))
        fqn = next((first[each] for each in candidates if each in first), None)
        if fqn is None:
            foreign.append(name)
        else:
            found.append(fqn)
    if foreign:
        raise RekeyError(f"expected names of parameters of {type(model).__name__}, got others: {', '.join(foreign)}")
    return found


def _check_shapes(state: Mapping[Any, Any], fqns: Mapping[Any, str], model: nn.Module) -> None:
    """Refuse state in which no tensor with the parameter's number of dims has its sizes; size 1 fits any size."""
    shapes = {member.fqn: member.parameter.shape for member in named_parameters(model)}
    wrong = []
    for key, entries in state.items():
        shape = shapes[fqns[key]]
        tensors = [leaf for _, leaf in leaves(entries) if isinstance(leaf, Tensor) and leaf.ndim == len(shape)]
        fitting = [all(size in (1, whole) for size, whole in zip(each.shape, shape, strict=True)) for each in tensors]
        if tensors and not any(fitting):
            wrong.append(f"{fqns[key]} (expected {list(shape)}, got {list(tensors[0].shape)})")
    if wrong:
        raise RekeyError(
            f"expected ids in the order of the parameters of {type(model).__name__}, got state of other shapes: "
            f"{'; '.join(wrong)}; pass optim=, an optimizer with its parameters in the state's order"
        )


def _to_ids(state: Mapping[str, Any], model: nn.Module, optim: Optimizer | None) -> OptimState:
    groups = state["param_groups"]
    every = named_parameters(model)
    if any(not isinstance(name, str) for group in groups for name in group["params"]):
        raise RekeyError('expected a state with names of parameters, got one with ids; leave it, or pass to="fqn"')
    names = [_known_names(group["params"], every, model) for group in groups]
    if optim is not None:
        wanted = [[member.fqn for member in members] for members in named_groups(model, optim)]
        if [sorted(group) for group in wanted] != [sorted(group) for group in names]:
            raise RekeyError(
                f"expected optim to have the groups of the state, {names}, got {wanted}; make it with these groups"
            )
        names = wanted
    ids = {fqn: index for index, fqn in enumerate(chain.from_iterable(names))}
    keys = dict(zip(_known_names(state["state"], every, model), state["state"], strict=True))
    if foreign := [fqn for fqn in keys if fqn not in ids]:
        raise RekeyError(f"expected state of the groups' parameters, got state of others: {', '.join(foreign)}")
    return {
        "state": {index: state["state"][keys[fqn]] for fqn, index in ids.items() if fqn in keys},
        "param_groups": [
            {**options_of(group), "params": [ids[fqn] for fqn in members]}
            for group, members in zip(groups, names, strict=True)
        ],
    }
