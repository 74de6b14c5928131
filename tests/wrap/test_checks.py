"""Refused plans: the error message, and the unchanged model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import compile_fsdp
from compile_fsdp import errors
from compile_fsdp.wrap import CustomPolicy, ModuleWrapPolicy, Policy, apply, auto_shard, plan
from helpers.models.reference import CASES
from helpers.models.sharded import groups_of, snapshot
from helpers.models.stacks import Block
from helpers.ranks.fake_world import fake_world


class Own:
    """User policy that selects modules by FQN."""

    def __init__(self, *fqns: str) -> None:
        self.fqns = fqns

    def select(self, root: nn.Module, ignored: Any, root_kwargs: Any) -> Any:
        return {root.get_submodule(fqn): {} for fqn in self.fqns}

    def __repr__(self) -> str:
        return "Own()"


def build(case: str) -> Any:
    return CASES[case]().model


def refusal(model: nn.Module, policy: Policy | None, error: type[Exception], **arguments: Any) -> str:
    """Return the message of a refused plan that leaves the model unchanged."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        auto_shard(model, policy, **arguments)
    assert snapshot(model) == before
    return str(caught.value)


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_world(4):
        yield


def test_policy_that_selects_nothing_is_refused() -> None:
    policy = ModuleWrapPolicy({nn.Conv2d, nn.Embedding})
    message = refusal(build("mlp"), policy, errors.NothingSelectedError)
    assert "expected ModuleWrapPolicy({Conv2d, Embedding}) to select modules below Stack, it selects none" in message
    assert "name some of its classes, ['Block', 'LayerNorm', 'Linear'], in" in message
    assert "Own()" in refusal(build("mlp"), Own(""), errors.NothingSelectedError)
    assert "RepeatedBlocksPolicy()" in refusal(build("tied_ends"), None, errors.NothingSelectedError)


def test_containers_without_a_forward_are_refused() -> None:
    message = refusal(build("mlp"), ModuleWrapPolicy({nn.ModuleList, Block}), errors.NoForwardError)
    assert "expected modules that are called, got {'layers': 'ModuleList'}, which have no forward" in message
    message = refusal(build("mlp").layers, ModuleWrapPolicy({Block}), errors.NoForwardError)
    assert "{'the root': 'ModuleList'}" in message


def test_selected_modules_inside_ignored_modules_are_refused() -> None:
    model = build("mlp")
    policy = Own("layers.0", "layers.1.up", "out")
    message = refusal(model, policy, errors.IgnoredModuleError, ignored_modules=[model.layers])
    assert "Own() to leave out ignored modules, it selects ['layers.0', 'layers.1.up']" in message
    message = refusal(model, policy, errors.IgnoredModuleError, ignored_modules=[nn.Linear(2, 2), model])
    assert "expected ignored modules below Stack, got ['Linear', 'Stack']" in message


def test_already_sharded_modules_are_refused_only_if_selected() -> None:
    model = build("mlp")
    compile_fsdp.fully_shard(model.layers[0])
    message = refusal(model, ModuleWrapPolicy({Block, nn.LayerNorm}), errors.AlreadyShardedError)
    assert "expected modules that are not sharded yet, got ['layers.0', 'layers.0.norm']" in message
    # A sharded module keeps its sharding if it is not selected, or if it is ignored.
    planned = plan(model, Own("layers.1"))
    assert not any(name.startswith("layers.0") for group in planned.groups for name in group.parameters)
    auto_shard(model, ModuleWrapPolicy({Block}), ignored_modules=[model.layers[0]])
    assert [group["modules"] for group in groups_of(model)] == [[""], ["layers.0"], ["layers.1"]]


def test_second_apply_of_a_plan_is_refused() -> None:
    model = build("mlp")
    planned = plan(model)
    apply(planned)
    before = snapshot(model)
    with pytest.raises(errors.AlreadyShardedError, match=r"\['layers.0', 'layers.1', 'the root'\]"):
        apply(planned)
    assert snapshot(model) == before


def test_fsdp1_modules_are_refused() -> None:
    model = build("mlp")
    model.out = FullyShardedDataParallel(model.out, device_id=torch.device("cpu"))
    assert "FullyShardedDataParallel at ['out']" in refusal(model, None, errors.FSDP1Error)


def test_selected_modules_outside_the_root_are_refused() -> None:
    foreign = SimpleNamespace(select=lambda root, *_: {nn.Linear(2, 3): {}, root.inp: {}})
    message = refusal(build("mlp"), foreign, errors.PolicyError)
    assert "modules of Stack, got Linear(in_features=2, out_features=3, bias=True)" in message


def test_invalid_fully_shard_arguments_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    answers: dict[str, dict[str, Any]] = {
        "inp": {"sharding_strategy": 1},
        "layers.0": {"mesh": mesh},
        "layers.1": {"reshard_after_forward": 3},
        "out": {"reshard_after_forward": 2},
    }
    model = build("mlp")
    names = {module: fqn for fqn, module in model.named_modules()}
    policy = CustomPolicy(lambda module: answers.get(names[module], False))
    message = refusal(model, policy, errors.PolicyError)
    assert "'inp': ['sharding_strategy= is unknown']" in message
    assert "'layers.0': ['mesh has 3 dims, not 1 or 2']" in message
    assert "'layers.1': ['reshard_after_forward=3 is no factor of 4 ranks']" in message
    assert "'out':" not in message
    assert "'the root': ['shard= is unknown']" in refusal(model, Own("out"), errors.PolicyError, shard=1)


def test_unshardable_parameters_are_refused() -> None:
    model = build("mlp")
    model.temperature = nn.Parameter(torch.tensor(1.0))
    model.inp.weight = nn.Parameter(torch.ones(8, 8).T)
    message = refusal(model, None, errors.UnshardableParameterError)
    assert "'temperature': 'a scalar, not a tensor of one element'" in message
    assert "'inp.weight': 'not contiguous: shape (8, 8), stride (1, 8)'" in message
    message = refusal(build("uneven"), None, errors.UnshardableParameterError, shard_placement_fn=lambda p: Shard(-1))
    assert "in dim 1 over 4 ranks, where only dim 0 may be split unevenly" in message


def test_missing_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    mesh = init_device_mesh("cpu", (4,))
    with_mesh = CustomPolicy(lambda module: isinstance(module, Block) and {"mesh": mesh})  # but not for the root
    torch.distributed.destroy_process_group()
    try:
        refusal(build("mlp"), with_mesh, errors.ProcessGroupMissingError)
        overrides = (nn.LayerNorm,)
        message = refusal(build("mlp"), None, errors.ProcessGroupMissingError, mixed_precision_overrides=overrides)
    finally:
        torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=4)
    assert "init_process_group(), run under torchrun, or pass mesh=" in message


def test_parameters_shared_between_groups_are_refused() -> None:
    message = refusal(build("tied_ends"), Own("embedding", "head", "block"), errors.SharedParameterError)
    assert "{'embedding.weight = head.weight': ['embedding', 'head']}; pass fix_shared=True" in message
    message = refusal(build("tied_ends"), Own("embedding", "block"), errors.SharedParameterError)
    assert "{'embedding.weight = head.weight': ['embedding', 'the root']}" in message


def test_shared_modules_are_refused_unless_selected_or_merged() -> None:
    model = build("mlp")
    model.layers[1].norm = model.layers[0].norm
    message = refusal(model, None, errors.SharedParameterError)
    assert "'layers.0.norm.bias = layers.1.norm.bias': ['layers.0', 'layers.1']" in message
    assert "select a shared module itself, if it is only ever called" in message
    # If selected itself, it is one group, before both modules that use it.
    groups = plan(model, ModuleWrapPolicy({Block, nn.LayerNorm})).groups
    assert [group.fqns for group in groups] == [("layers.0.norm",), ("layers.0",), ("layers.1",), ("",)]
    (merged, _) = plan(model, fix_shared=True).groups
    assert merged.fqns == ("layers.0", "layers.1")


def test_sharing_groups_with_different_arguments_are_refused() -> None:
    def ends(module: nn.Module) -> bool | dict[str, Any]:
        return isinstance(module, nn.Embedding) and {"reshard_after_forward": False}

    for fix_shared in (False, True):
        message = refusal(
            build("tied_ends"), CustomPolicy(ends), errors.SharedParameterError, fix_shared=fix_shared
        )
        assert "the same arguments for embedding and the root, which share parameters" in message
        assert "got {'reshard_after_forward': [False, 'not given']}" in message


def test_nested_groups_that_share_parameters_merge_into_the_outer_group() -> None:
    # The inner group merges into the outer group, also through a group in between.
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), nn.Linear(2, 2))
    model[0].register_parameter("weight", model[0][0][0].weight)  # type: ignore[index, union-attr, arg-type]
    (merged, _, root) = plan(model, Own("0", "0.0", "0.0.0", "1"), fix_shared=True).groups
    assert merged.fqns == ("0",)
    assert merged.parameters == ("0.weight", "0.0.0.bias", "0.0.1.weight", "0.0.1.bias")
    assert root.parameters == ()


def pairs() -> Any:
    """Two modules of two layers each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


def test_group_of_several_modules_is_between_its_inner_and_outer_groups() -> None:
    # [0.0, 1] is inside 0, which comes first in the tree; 1.0 is inside [0.0, 1].
    model = pairs()
    model[1].register_parameter("weight", model[0][0].weight)
    planned = plan(model, Own("0", "0.0", "1", "1.0"), fix_shared=True)
    assert [group.fqns for group in planned.groups] == [("1.0",), ("0.0", "1"), ("0",), ("",)]
    apply(planned)
    found = {tuple(each["modules"]): each["groups"] for each in groups_of(model)}
    for group in planned.groups[:-1]:
        (torch_group,) = found[group.fqns]
        assert tuple(torch_group["parameters"]) == group.parameters
    assert model[0][0].weight is model[1].weight


def test_mutually_nested_groups_merge() -> None:
    # Sharing makes [0.0, 1] and [0, 1.0], and neither could be sharded first.
    model = pairs()
    model[1].register_parameter("first", model[0][0].weight)
    model[0].register_parameter("second", model[1][0].weight)
    planned = plan(model, Own("0", "0.0", "1", "1.0"), fix_shared=True)
    assert [group.fqns for group in planned.groups] == [("0", "1"), ("",)]
    assert len(planned.groups[0].parameters) == 8


def test_plan_warns_of_frozen_parameters_grouped_with_trainable_parameters() -> None:
    model = build("frozen")  # the first block, and a (24, 8) weight of the second
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    (warning,) = plan(model, mp_policy=half).warnings
    assert warning.startswith("layers.1: 1 frozen parameters are in one group with 6 trainable ones")
    assert "gathers their 384 bytes" in warning
    assert "768 bytes" in plan(model).warnings[0]
    assert warning in str(plan(model, mp_policy=half))
    assert plan(build("frozen_layers")).warnings == ()
    with pytest.warns(errors.MixedFrozenWarning, match=r"layers\.1: 1 frozen"):
        auto_shard(model)


def test_modules_that_cannot_run_in_full_precision_are_refused() -> None:
    model = build("mlp")
    model.layers[1].norm.bfloat16()
    model.layers[0].norm.forward = lambda x: x
    message = refusal(model, None, errors.PrecisionOverrideError, mixed_precision_overrides=(nn.LayerNorm,))
    assert "'layers.1.norm.weight': 'torch.bfloat16', 'layers.1.norm.bias': 'torch.bfloat16'" in message
    assert "'layers.0.norm': 'a forward of its own'" in message
    plan(model, mixed_precision_overrides=(nn.LayerNorm,), ignored_modules=[model.layers[0].norm, model.layers[1].norm])
