"""`param_info` gives names and shard regions of managed parameters without communication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import compile_fsdp
from compile_fsdp.errors import ForeignParameterError
from compile_fsdp.state import Region, optim_state_dict, param_info
from helpers.models.optimizers import everything
from helpers.models.reference import Stack
from helpers.ranks.fake_world import fake_world


@pytest.fixture
def model() -> Iterator[Stack]:
    """An unsharded model on one of two ranks."""
    with fake_world(2):
        yield Stack()


def test_info_has_group_shape_dtype_placements_and_aliases() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        infos = param_info(everything(mesh, blocks=(0, 2)))
    assert list(infos) == [name for name, _ in everything().named_parameters() if name != "plain"]  # is not managed
    embedding = infos["embedding.weight"]
    assert embedding.group == ("",) and embedding.aliases == ("head.weight",)
    assert embedding.shape == (11, 6) and embedding.dtype == torch.float32
    assert embedding.placements == (Shard(0),) and embedding.mesh == mesh
    assert infos["layers.0.weight"].group == ("layers.0",)
    assert infos["layers.1.weight"].group == ("",)


def test_regions_of_uneven_and_empty_shards() -> None:
    with fake_world(4):
        infos = param_info(everything(init_device_mesh("cpu", (4,))))
        assert infos["embedding.weight"].regions == {
            0: Region((0, 0), (3, 6)),
            1: Region((3, 0), (3, 6)),
            2: Region((6, 0), (3, 6)),
            3: Region((9, 0), (2, 6)),
        }
        assert infos["scale"].regions[0] == Region((0,), (1,))
        assert [infos["scale"].regions[rank].numel for rank in range(4)] == [1, 0, 0, 0]


def test_group_of_several_modules_lists_every_module(model: Stack) -> None:
    compile_fsdp.fully_shard([model.layers[0], model.layers[1]])
    compile_fsdp.fully_shard(model)
    infos = param_info(model)
    assert infos["layers.1.up.weight"].group == ("layers.0", "layers.1")
    assert infos["inp.weight"].group == ("",)


def test_names_are_relative_to_the_given_module(model: Stack) -> None:
    compile_fsdp.fully_shard(model.layers[0])
    compile_fsdp.fully_shard(model)
    wrapper = nn.ModuleDict({"generator": model, "critic": nn.Linear(8, 8)})
    expected = [name for name, _ in model.named_parameters()]
    assert list(param_info(model)) == expected
    assert list(param_info(wrapper)) == [f"generator.{name}" for name in expected]
    assert param_info(wrapper)["generator.layers.0.scale"].group == ("generator.layers.0",)
    assert list(param_info(model.layers[0])) == [name for name, _ in model.layers[0].named_parameters()]
    assert param_info(model.layers[0])["scale"].group == ("",)


def test_names_omit_compile_and_checkpoint_wrappers(model: Stack) -> None:
    expected = [name for name, _ in model.named_parameters()]
    for index, layer in enumerate(model.layers):
        compile_fsdp.fully_shard(layer)
        model.layers[index] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    compile_fsdp.fully_shard(model)
    compiled = torch.compile(model, backend="eager")
    assert list(param_info(compiled)) == expected
    optim = torch.optim.SGD(compiled.parameters())
    assert optim_state_dict(compiled, optim)["param_groups"][0]["params"] == expected


def test_names_keep_a_submodule_named_module_but_omit_ddp(model: Stack) -> None:
    outer = nn.Sequential()
    outer.module = model  # not DDP
    compile_fsdp.fully_shard(outer)
    assert "module.inp.weight" in param_info(outer)
    distributed = nn.parallel.DistributedDataParallel(Stack())
    names = optim_state_dict(distributed, torch.optim.SGD(distributed.parameters()))["param_groups"][0]["params"]
    assert names[0] == "inp.weight"


def test_names_do_not_change_after_unshard(model: Stack) -> None:
    compile_fsdp.fully_shard(model)
    before = param_info(model)
    optim = torch.optim.SGD(model.parameters())
    model.unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert param_info(model) == before
    assert optim_state_dict(model, optim)["param_groups"][0]["params"] == list(before)


def test_optimizer_created_before_sharding_is_refused(model: Stack) -> None:
    optim = torch.optim.SGD([model.inp.weight, model.out.bias])
    compile_fsdp.fully_shard(model)
    with pytest.raises(ForeignParameterError, match=r"group 0, parameter 0, shape \[8, 8\]; group 0, parameter 1"):
        optim_state_dict(model, optim)
