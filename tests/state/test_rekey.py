"""Conversion of unsharded optimizer state between ids and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp.errors import RekeyError
from compile_fsdp.state import rekey_optim_state
from helpers.models.optimizers import OPTIMIZERS, assert_same, everything, groups_of, train


def _trained(make: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = everything()
    optim = torch.optim.AdamW(make(model))
    train(model, optim, range(2))
    return model, optim


def _check_names(state: Any, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    named = [parameters[fqn] for group in state["param_groups"] for fqn in group["params"]]
    held = [parameter for group in optim.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(named, held, strict=True))
    for fqn, entries in state["state"].items():
        assert entries is optim.state_dict()["state"][next(i for i, p in enumerate(held) if p is parameters[fqn])]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.parameters(),
        lambda model: [parameter for parameter in model.parameters() if parameter.requires_grad],
        lambda model: list(model.named_parameters())[::-1],
        lambda model: torch.compile(model, backend="eager").named_parameters(),
    ],
    ids=["all", "trainable", "named", "named while compiled"],
)
def test_ids_convert_to_names_and_back(make: Any) -> None:
    model, optim = _trained(make)
    state = rekey_optim_state(optim.state_dict(), model, to="fqn")
    _check_names(state, model, optim)
    assert all("param_names" not in group for group in state["param_groups"])
    back = rekey_optim_state(state, model, to="id")
    assert back["state"].keys() == optim.state_dict()["state"].keys()
    assert back["param_groups"][0]["params"] == optim.state_dict()["param_groups"][0]["params"]
    again = torch.optim.AdamW(optim.param_groups[0]["params"])
    again.load_state_dict(back)
    for parameter, entries in optim.state.items():
        assert all(torch.equal(again.state[parameter][key], value) for key, value in entries.items())


def test_several_groups_need_an_optimizer_with_equal_groups() -> None:
    model, optim = _trained(groups_of)
    with pytest.raises(RekeyError, match=r"got 4 groups without; pass optim="):
        rekey_optim_state(optim.state_dict(), model, to="fqn")
    with pytest.raises(RekeyError, match="groups of"):
        rekey_optim_state(optim.state_dict(), model, to="fqn", optim=torch.optim.SGD(model.parameters()))
    state = rekey_optim_state(optim.state_dict(), model, to="fqn", optim=torch.optim.AdamW(groups_of(model)))
    _check_names(state, model, optim)


def test_ids_follow_the_order_of_the_given_optimizer() -> None:
    model, optim = _trained(lambda model: model.parameters())
    state = rekey_optim_state(optim.state_dict(), model, to="fqn")
    other = torch.optim.AdamW(list(model.parameters())[::-1])
    other.load_state_dict(rekey_optim_state(state, model, to="id", optim=other))
    for parameter, entries in optim.state.items():
        assert all(torch.equal(other.state[parameter][key], value) for key, value in entries.items())
    with pytest.raises(RekeyError, match="expected optim to have the groups of the state"):
        rekey_optim_state(state, model, to="id", optim=torch.optim.AdamW(groups_of(model)))


def test_wrong_order_of_ids_is_detected_by_shapes() -> None:
    model, optim = _trained(lambda model: list(model.parameters())[::-1])
    with pytest.raises(RekeyError, match=r"got state of other shapes: .*\(expected \[1\], got \[6\]\)"):
        rekey_optim_state(optim.state_dict(), model, to="fqn")
    adafactor = OPTIMIZERS["adafactor"](model.parameters())  # states with reduced dims fit
    train(model, adafactor, range(1))
    names = [name for name, _ in model.named_parameters()]
    state = adafactor.state_dict()
    group = {**state["param_groups"][0], "params": names}
    by_hand = {"state": {names[i]: entries for i, entries in state["state"].items()}, "param_groups": [group]}
    assert_same(rekey_optim_state(state, model, to="fqn"), by_hand)


def test_unknown_parameter_wrong_count_or_invalid_target_is_refused() -> None:
    model, optim = _trained(lambda model: model.parameters())
    state = rekey_optim_state(optim.state_dict(), model, to="fqn")
    with pytest.raises(RekeyError, match=r"got others: scale, plain, spare, embedding\.weight"):
        rekey_optim_state(state, nn.ModuleDict({"layers": model.layers, "norm": model.norm}), to="id")
    with pytest.raises(RekeyError, match="got 7; pass optim="):
        rekey_optim_state(torch.optim.SGD(list(model.parameters())[:7]).state_dict(), model, to="fqn")
    with pytest.raises(RekeyError, match="got 'name'"):
        rekey_optim_state(state, model, to="name")  # type: ignore[arg-type]


def test_names_stay_with_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optim = torch.optim.AdamW(list(model.parameters())[::-1])
    model(torch.rand(3, 4)).sum().backward()
    optim.step()
    named = rekey_optim_state(optim.state_dict(), model, to="fqn", optim=optim)
    for other in (None, torch.optim.AdamW(model.parameters())):
        assert_same(rekey_optim_state(named, model, to="fqn", optim=other), named)
    with pytest.raises(RekeyError, match="got one with ids"):
        rekey_optim_state(optim.state_dict(), model, to="id")
