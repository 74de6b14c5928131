"""Checkpoints load across world sizes, meshes and wrappings, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compile_fsdp
from compile_fsdp.state import load, load_optim_state_dict, optim_state_dict, param_info, rekey_optim_state, save
from helpers.models.blockwise import shard_blocks
from helpers.models.optimizers import OPTIMIZERS, assert_same, everything, groups_of, trained, whole
from helpers.models.reference import Stack
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import run_ranks
from helpers.ranks.worlds import world_of


def _model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def _through_world_sizes(rank: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    model, optim = trained(2, name=name)
    expected = rekey_optim_state(optim.state_dict(), model, to="fqn", optim=optim)
    weights = _model_state(model)
    with world_of(rank, 1, folder, "start") as inside:
        if inside:  # the checkpoint of an unsharded run
            save(model, optim, f"{folder}/run", 2)
    wrappings = ((0, 1, 2), (1,), (0, 2), ())
    for number, (size, blocks) in enumerate(zip((2, 4, 1, 3), wrappings, strict=True)):
        with world_of(rank, size, folder, str(number)) as inside:
            if not inside:
                continue
            sharded = everything(init_device_mesh("cpu", (size,)), blocks)
            with torch.no_grad():
                for parameter in sharded.parameters():
                    parameter.zero_()
            sharded_optim = OPTIMIZERS[name](groups_of(sharded))
            assert load(sharded, sharded_optim, f"{folder}/run") == number + 2
            assert_same(optim_state_dict(sharded, sharded_optim), expected)
            for fqn, value in _model_state(sharded).items():
                assert torch.equal(value, weights[fqn])
            save(sharded, sharded_optim, f"{folder}/run", number + 3)


@pytest.mark.parametrize("name", ["adamw_foreach", "adafactor", "hoarder"])
def test_checkpoint_loads_across_world_sizes_and_wrappings(name: str, tmp_path: Path) -> None:
    run_ranks(4, _through_world_sizes, str(tmp_path), name)


LAYOUTS = ("1-d", "hsdp", "columns", "unsharded", "tensor parallel", "list", "replicate")


def _build(layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(dim=12)
    line = init_device_mesh("cpu", (4,))
    if layout == "1-d":
        shard_blocks(model, mesh=line)
    elif layout == "hsdp":
        grid = shared_mesh("cpu", (2, 2), ("replicate", "shard"))
        compile_fsdp.fully_shard(model, mesh=grid)
    elif layout == "columns":
        for block in model.layers:
            compile_fsdp.fully_shard(block, mesh=line, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        compile_fsdp.fully_shard(model, mesh=line)
    elif layout == "tensor parallel":
        grid = shared_mesh("cpu", (2, 2), ("dp", "tp"))
        for block in model.layers:
            parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard_blocks(model, mesh=grid["dp"])
    elif layout == "replicate":
        replicate(model, mesh=line)
    elif layout == "list":
        compile_fsdp.fully_shard(list(model.layers), mesh=line)
        compile_fsdp.fully_shard(model, mesh=line)
    return model


def _check_regions(model: nn.Module, rank: int) -> None:
    """Check that the rank's shard of each parameter is its region in `param_info`."""
    whole_model = _build("unsharded")
    parameters = dict(model.named_parameters())
    infos = param_info(model)
    assert list(infos) == [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    for name, info in infos.items():
        local: Any = parameters[name]
        assert torch.equal(local.to_local(), whole_model.get_parameter(name)[info.regions[rank].slices])


def _step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    model(torch.randn(4, 12), torch.randn(4, 3)).backward()
    optim.step()
    optim.zero_grad()


def _from_each_layout_to_the_next(rank: int, folder: str) -> None:
    state, source = None, None
    expected: Any = None
    for layout in (*LAYOUTS, LAYOUTS[0]):
        model = _build(layout)
        _check_regions(model, rank)
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        if state is None:
            _step(model, optim)
            expected = optim_state_dict(model, optim, full=True)
        else:
            load_optim_state_dict(model, optim, state)
            assert_same(optim_state_dict(model, optim, full=True), expected)
            fresh = torch.optim.AdamW(model.parameters(), foreach=False)
            assert load(model, fresh, source) == 1
            assert_same(optim_state_dict(model, fresh), expected)
            alone = optim_state_dict(model, fresh, full=True, rank0_only=True)
            if rank == 0:
                assert_same(alone, expected)
            fresh = torch.optim.AdamW(model.parameters(), foreach=False)
            load_optim_state_dict(model, fresh, alone)
            assert_same(optim_state_dict(model, fresh), expected)
        state = optim_state_dict(model, optim)
        source = save(model, optim, f"{folder}/{layout}", 1)
        if layout != "1-d":
            _step(model, fresh)  # the optimizer can step on the loaded layout
    assert expected is not None


def test_state_and_checkpoint_load_across_layouts(tmp_path: Path) -> None:
    run_ranks(4, _from_each_layout_to_the_next, str(tmp_path))
