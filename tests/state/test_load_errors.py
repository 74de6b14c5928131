"""Refusal of a mismatched state names all problems and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp.errors import CheckpointError, StateError, StateMismatchError
from compile_fsdp.state import load, load_optim_state_dict, optim_state_dict, save
from helpers.models.optimizers import assert_same, everything, groups_of, train, trained, whole
from helpers.ranks.pools import run_ranks

State = dict[str, Any]


def _damage(state: State) -> None:
    state["state"]["layers.0.bias"].pop("exp_avg")
    state["state"]["layers.0.weight"]["exp_avg_sq"] = state["state"]["layers.0.weight"]["exp_avg_sq"].double()
    state["state"]["norm.weight"]["exp_avg"] = torch.ones(7)
    state["state"]["norm.bias"]["exp_avg"] = "no tensor"
    state["state"]["scale"]["momentum"] = torch.ones(1)
    state["state"]["stranger"] = {"step": torch.tensor(1.0)}
    state["param_groups"][0]["params"].remove("layers.1.bias")
    state["state"].pop("layers.1.bias")


FOUND = (
    "missing: layers.0.bias: exp_avg, layers.1.bias; "
    "unexpected: scale: momentum, stranger; "
    "wrong shape: norm.bias: exp_avg (expected a tensor of shape [6], got no tensor), "
    "norm.weight: exp_avg (expected [6], got [7]); "
    "wrong dtype: layers.0.weight: exp_avg_sq (expected torch.float32, got torch.float64). "
)


def _snapshot(model: Any, optim: torch.optim.Optimizer) -> tuple[State, dict[str, torch.Tensor]]:
    return optim_state_dict(model, optim, full=True), {
        name: whole(value).clone() for name, value in model.state_dict().items()
    }


def _refusal(model: Any, optim: torch.optim.Optimizer, error: type[Exception], load: Callable[[], object]) -> str:
    """Return the message of a refused load, which changes neither the model nor its optimizer."""
    state, weights = _snapshot(model, optim)
    message = _raised(error, load)
    state_then, weights_then = _snapshot(model, optim)
    assert_same(state_then, state)
    assert all(torch.equal(weights_then[name], value) for name, value in weights.items())
    return message


def _refused(rank: int, kind: str, with_state: bool) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(2, mesh)
    state = optim_state_dict(model, optim, full=True, rank0_only=kind == "on rank 0")
    if state and (kind != "on rank 1 alone" or rank == 1):
        _damage(state)
    other, other_optim = trained(1 if with_state else 0, mesh)
    return _refusal(other, other_optim, StateMismatchError, lambda: load_optim_state_dict(other, other_optim, state))


@pytest.mark.parametrize(("kind", "with_state"), [("everywhere", True), ("on rank 0", False)])
def test_all_mismatched_entries_are_named(kind: str, with_state: bool) -> None:
    messages = run_ranks(2, _refused, kind, with_state)
    assert messages[0] == messages[1]
    assert f"expected the optimizer state to fit the model and its optimizer, got {FOUND}" in messages[0]


def test_states_that_differ_between_ranks_are_refused() -> None:
    messages = run_ranks(2, _refused, "on rank 1 alone", False)
    assert messages[0] == messages[1]
    for part in ("a part of the ranks alone: ", "stranger: step float32[]", "layers.1.bias: exp_avg float32[6]"):
        assert part in messages[0]


def _raised(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as info:
        call()
    return str(info.value)


def _some_ranks_have_a_state(rank: int) -> list[str]:
    model, optim = trained(2, init_device_mesh("cpu", (2,)))
    sharded, full = optim_state_dict(model, optim), optim_state_dict(model, optim, full=True)
    messages = [
        _raised(StateError, lambda: load_optim_state_dict(model, optim, sharded if rank == 0 else {})),
        _raised(StateError, lambda: load_optim_state_dict(model, optim, full if rank == 1 else {})),
        _raised(StateError, lambda: load_optim_state_dict(model, optim, {})),
        _raised(StateError, lambda: optim_state_dict(model, optim, rank0_only=True)),
    ]
    # The unmanaged parameter got a gradient on one rank only.
    if rank == 1:
        optim.state.pop(model.plain)
    messages.append(_raised(StateMismatchError, lambda: optim_state_dict(model, optim, full=True)))
    return messages


def test_state_on_only_some_ranks_is_refused() -> None:
    first, second = run_ranks(2, _some_ranks_have_a_state)
    assert first == second
    assert "got a sharded one on ranks [0] of 2" in first[0]
    assert "on ranks [1] of 2" in first[1] and "on ranks [] of 2" in first[2]
    assert "pass full=True" in first[3]
    assert "plain: exp_avg float32[6]" in first[4]


def _a_checkpoint_that_does_not_fit(rank: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(2, mesh)
    save(model, optim, folder, 2)
    other = everything()
    other.layers[1] = nn.Linear(6, 6, bias=False)
    other.norm = nn.LayerNorm(6, dtype=torch.float64)
    other.extra = nn.Parameter(torch.ones(3))
    other.scale = nn.Parameter(torch.ones(2))
    if rank == 1:
        other.only_here = nn.Parameter(torch.ones(1))
    other_optim = torch.optim.SGD(other.parameters(), momentum=0.9)
    return _refusal(other, other_optim, StateMismatchError, lambda: load(other, other_optim, folder))


def test_mismatched_checkpoint_is_refused(tmp_path: Path) -> None:
    messages = run_ranks(2, _a_checkpoint_that_does_not_fit, str(tmp_path))
    assert messages[0] == messages[1]
    for part in (
        "missing: ",
        "extra",
        "layers.1.bias",
        "only_here",
        "scale (expected [2], got [1])",
        "norm.bias (expected torch.float64, got torch.float32)",
        "embedding.weight: momentum_buffer",  # an AdamW state for SGD
        "embedding.weight: exp_avg_sq",
    ):
        assert part in messages[0]


def _a_damaged_file(rank: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(2, mesh)
    target = save(model, optim, folder, 2)
    if rank == 0:
        file = target / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-200])
    dist.barrier()
    train(model, optim, range(2, 4))
    return _refusal(model, optim, CheckpointError, lambda: load(model, optim, folder))


def test_damaged_checkpoint_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    messages = run_ranks(2, _a_damaged_file, str(tmp_path))
    assert messages[0] == messages[1]
    assert f"cannot read the checkpoint {tmp_path}/step-00000002: " in messages[0]


def test_non_strict_load_ignores_missing_and_unknown_parameters() -> None:
    model, optim = trained(2)
    other, other_optim = trained(1)
    kept = other_optim.state[other.layers[1].bias]["exp_avg"].clone()
    state = optim_state_dict(model, optim)
    state["state"]["stranger"] = {"step": torch.tensor(1.0)}
    state["param_groups"][0]["params"].remove("layers.1.bias")
    state["state"].pop("layers.1.bias")
    state["state"]["scale"]["momentum"] = torch.ones(1)
    with pytest.raises(StateMismatchError):
        load_optim_state_dict(other, other_optim, state)
    load_optim_state_dict(other, other_optim, state, strict=False)
    loaded = optim_state_dict(other, other_optim)
    assert torch.equal(loaded["state"]["layers.1.bias"]["exp_avg"], kept)
    assert torch.equal(loaded["state"]["layers.1.weight"]["exp_avg"], state["state"]["layers.1.weight"]["exp_avg"])
    assert "stranger" not in loaded["state"] and "momentum" in loaded["state"]["scale"]
    with pytest.raises(StateMismatchError, match=r"wrong shape: scale: exp_avg \(expected \[1\], got \[3\]\)"):
        state["state"]["scale"]["exp_avg"] = torch.ones(3)
        load_optim_state_dict(other, other_optim, state, strict=False)


def test_non_strict_load_keeps_dtypes_and_strings_of_what_is_missing() -> None:
    model, optim = trained(2, name="hoarder")
    other, other_optim = trained(1, name="hoarder")
    state, before = optim_state_dict(model, optim), copy.deepcopy(optim_state_dict(other, other_optim)["state"])
    state["param_groups"][0]["params"].remove("layers.1.bias")
    state["state"].pop("layers.1.bias")
    for entry in ("half", "by_dim"):
        state["state"]["scale"].pop(entry)
    load_optim_state_dict(other, other_optim, state, strict=False)
    loaded = optim_state_dict(other, other_optim)
    expected = {name: before[name] if name == "layers.1.bias" else state["state"][name] for name in before}
    sources = {"half": before, "by_dim": before}
    expected["scale"] = {name: sources.get(name, expected)["scale"][name] for name in before["scale"]}
    assert_same(loaded, {**loaded, "state": expected})


def test_failed_optimizer_load_restores_the_previous_state() -> None:
    model, optim = trained(2)
    state = optim_state_dict(model, optim, full=True)
    train(model, optim, range(2, 4))
    optim.register_load_state_dict_post_hook(Mock(side_effect=RuntimeError("not today")))
    assert "not today" in _refusal(model, optim, RuntimeError, lambda: load_optim_state_dict(model, optim, state))


def test_state_keyed_by_ids_is_refused_with_the_remedy() -> None:
    model, optim = trained(2)
    with pytest.raises(StateError, match="rekey_optim_state"):
        load_optim_state_dict(model, optim, optim.state_dict())
    with pytest.raises(StateError, match=r'"state" and "param_groups", got \[\'params\'\]'):
        load_optim_state_dict(model, optim, {"params": []})


def test_loaded_state_is_a_copy() -> None:
    model, optim = trained(2)
    state = optim_state_dict(model, optim, full=True)
    kept = {fqn: entries["exp_avg"].clone() for fqn, entries in state["state"].items()}
    load_optim_state_dict(model, optim, state)
    train(model, optim, range(2, 4))
    assert all(torch.equal(state["state"][fqn]["exp_avg"], value) for fqn, value in kept.items())


def test_groups_can_be_split_and_merged_if_options_agree() -> None:
    model, optim = trained(2)
    state = optim_state_dict(model, optim)
    one_by_one = [{"params": [parameter]} for parameter in model.parameters()]
    split = torch.optim.AdamW(one_by_one, lr=1.0)
    load_optim_state_dict(model, split, state)
    by_name = optim_state_dict(model, split)
    rates = {group["params"][0]: group["lr"] for group in by_name["param_groups"]}
    assert rates["norm.bias"] == 0.025 and rates["embedding.weight"] == 0.05
    assert all(group["amsgrad"] for group in by_name["param_groups"])  # amsgrad decides which state is kept
    merged = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateMismatchError, match=r"rest of its group: .*embedding.weight \(lr; group 0\)"):
        load_optim_state_dict(model, merged, state)
    assert not merged.state
    for group in state["param_groups"]:
        group["lr"] = 0.025
    load_optim_state_dict(model, merged, state)
    assert merged.param_groups[0]["lr"] == 0.025 and len(merged.state) == len(optim.state)


class NoProbing(torch.optim.SGD):
    """SGD that cannot step without a closure."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("closure")
        return super().step(closure)


def _without_a_probe(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = everything(mesh)
    optim = torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9)
    train(model, optim, range(2))
    for make in (NoProbing, torch.optim.SGD):
        state = optim_state_dict(model, optim, full=True)
        state["state"]["norm.bias"]["of another shape"] = torch.ones(2, 3)
        other = everything(mesh)
        other_optim = make(groups_of(other), lr=0.1, momentum=0.9)
        if make is torch.optim.SGD:
            with pytest.raises(StateMismatchError, match=r"unexpected: norm\.bias: of another shape"):
                load_optim_state_dict(other, other_optim, state)
        else:
            load_optim_state_dict(other, other_optim, state)
            assert_same(optim_state_dict(other, other_optim), state)


def test_optimizer_that_cannot_step_without_closure_loads_unexpected_entries() -> None:
    run_ranks(2, _without_a_probe)
