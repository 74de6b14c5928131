"""Optimizer state moves between unsharded and sharded runs, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from compile_fsdp.state import load_optim_state_dict, optim_state_dict, param_info, rekey_optim_state
from compile_fsdp.state.containers import leaves
from helpers.models.optimizers import OPTIMIZERS, assert_same, everything, groups_of, train, trained, whole
from helpers.ranks.pools import run_ranks

# torch.optim.Adafactor does not step on sharded parameters (torch 2.13.0); its state still moves.
STEPPING = [name for name in OPTIMIZERS if name != "adafactor"]


def _by_name(model: Any, optim: torch.optim.Optimizer) -> Any:
    return rekey_optim_state(optim.state_dict(), model, to="fqn", optim=optim)


def _check_forms(model: Any, optim: torch.optim.Optimizer) -> None:
    """Check full states, on all ranks and on rank 0, and each rank's shards against the sharded state."""
    state = optim_state_dict(model, optim)
    full = optim_state_dict(model, optim, full=True)
    assert_same(full, state)
    alone = optim_state_dict(model, optim, full=True, rank0_only=True, cpu_offload=True)
    if torch.distributed.get_rank() == 0:
        assert_same(alone, full)
    else:
        assert alone == {}
    assert not any(isinstance(leaf, DTensor) for form in (full, alone) for _, leaf in leaves(form))
    _check_shards(model, state, full)


def _check_shards(model: Any, state: Any, full: Any) -> None:
    """Check that each rank's shard is its region in `param_info`."""
    rank = torch.distributed.get_rank()
    infos = param_info(model)
    for fqn, entries in state["state"].items():
        for (_, leaf), (_, value) in zip(leaves(entries), leaves(full["state"][fqn]), strict=True):
            if isinstance(leaf, DTensor) and value.shape == infos[fqn].shape:
                assert torch.equal(leaf.to_local(), value[infos[fqn].regions[rank].slices])


def _from_unsharded_to_sharded_and_back(rank: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, optim = trained(2, name=name)
    state = _by_name(model, optim)
    sharded, sharded_optim = trained(0, mesh, name)
    assert optim_state_dict(sharded, sharded_optim)["state"] == {}
    weights = everything().state_dict()
    rng = torch.get_rng_state()
    load_optim_state_dict(sharded, sharded_optim, state)  # steps a copy of the optimizer
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(whole(value), weights[fqn]) for fqn, value in sharded.state_dict().items())
    assert_same(optim_state_dict(sharded, sharded_optim), state)
    # The loaded state has the layout that a step creates, so the run continues.
    if name in STEPPING:
        sharded.load_state_dict(_shards_of(model, sharded))
        train(sharded, sharded_optim, range(2, 4))
        copy, copy_optim = trained(4, name=name)
        assert_same(optim_state_dict(sharded, sharded_optim), _by_name(copy, copy_optim), exact=False)
        _check_forms(sharded, sharded_optim)
        load_optim_state_dict(sharded, sharded_optim, state)

    back = rekey_optim_state(optim_state_dict(sharded, sharded_optim, full=True), model, to="id")
    again = OPTIMIZERS[name](groups_of(model))
    again.load_state_dict(back)
    if name != "hoarder":  # torch's load_state_dict does not keep its dtypes and strings
        assert_same(_by_name(model, again), state)
        train(model, again, range(2, 4))
        uninterrupted, uninterrupted_optim = trained(4, name=name)
        assert_same(_by_name(model, again), _by_name(uninterrupted, uninterrupted_optim))


def _shards_of(model: Any, sharded: Any) -> dict[str, Any]:
    shards = dict(model.state_dict())
    for fqn, value in sharded.state_dict().items():
        if isinstance(value, DTensor):
            shards[fqn] = distribute_tensor(shards[fqn], value.device_mesh, value.placements)
    return shards


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_moves_from_unsharded_to_sharded_and_back(name: str) -> None:
    run_ranks(2, _from_unsharded_to_sharded_and_back, name)
