"""Plans equal sharding by hand in groups and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import compile_fsdp
from compile_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    RepeatedBlocksPolicy,
    SizePolicy,
    apply,
    auto_shard,
    plan,
)
from helpers.models.reference import CASES, Case
from helpers.models.sharded import groups_of, snapshot
from helpers.models.stacks import Block
from helpers.parity.features import columns
from helpers.ranks.fake_world import fake_world

_Seen = TypeVar("_Seen")

OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    """Small module with a submodule and a direct parameter."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Small(nn.Module):
    """Two layers between an embedding and a head; optionally tied weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def small(tied: bool = False) -> Case:
    model = Small(tied)
    return Case(model, list(model.layers), lambda: {"tokens": torch.randint(0, 8, (2, 3))})


@dataclass
class Way:
    """A policy, and the equivalent sharding by hand.

    Attributes:
        policy: The policy; None for the default.
        by_hand: Modules to shard before the root, with arguments that differ from the root's.
        arguments: The root's arguments.
        case: Makes the model.
        ignored: FQNs of ignored modules.
        fix_shared: As for `plan`.
    """

    policy: Policy | None
    by_hand: Callable[[Any], list[tuple[Any, dict[str, Any]]]]
    arguments: dict[str, Any] = field(default_factory=dict)
    case: Callable[[], Case] = small
    ignored: tuple[str, ...] = ()
    fix_shared: bool = False

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        ignored = [model.get_submodule(fqn) for fqn in self.ignored]
        auto_shard(model, self.policy, mesh=mesh, ignored_modules=ignored, fix_shared=self.fix_shared, **self.arguments)

    def shard_by_hand(self, model: nn.Module, mesh: DeviceMesh) -> None:
        arguments = {"mesh": mesh, **self.arguments}
        ignored = {parameter for fqn in self.ignored for parameter in model.get_submodule(fqn).parameters()}
        if ignored:
            arguments["ignored_params"] = ignored
        for module, own in self.by_hand(model):
            compile_fsdp.fully_shard(module, **{**arguments, **own})
        compile_fsdp.fully_shard(model, **arguments)


KEPT_IN_BF16 = {"mp_policy": BF16, "reshard_after_forward": False}


def _head_in_bf16(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Linear) and module.out_features == 8:
        return KEPT_IN_BF16
    return isinstance(module, Layer)


def _embeddings_and_heads(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features > 4)


WAYS = {
    "classes": Way(
        ModuleWrapPolicy({Layer, nn.Embedding}),
        lambda m: [(each, {}) for each in (m.embedding, *m.layers)],
        {"reshard_after_forward": False},
    ),
    "function": Way(
        CustomPolicy(_head_in_bf16), lambda m: [*((layer, {}) for layer in m.layers), (m.head, KEPT_IN_BF16)]
    ),
    # A layer has 20 elements, the embedding and the head 32 each.
    "size": Way(SizePolicy(20), lambda m: [(each, {}) for each in (m.embedding, *m.layers, m.head)]),
    "repeated blocks": Way(None, lambda m: [(layer, {}) for layer in m.layers], {"mp_policy": BF16}),
    "either": Way(
        RepeatedBlocksPolicy() | CustomPolicy(lambda m: isinstance(m, nn.Embedding) and OFFLOADED),
        lambda m: [(m.embedding, OFFLOADED), *((layer, {}) for layer in m.layers)],
    ),
    "ignored": Way(
        ModuleWrapPolicy({Layer}), lambda m: [(m.layers[1], {})], ignored=("layers.0", "embedding")
    ),
    "shared, side by side": Way(
        CustomPolicy(_embeddings_and_heads) | ModuleWrapPolicy({Layer}),
        lambda m: [*((layer, {}) for layer in m.layers), ([m.embedding, m.head], {})],
        case=lambda: small(tied=True),
        fix_shared=True,
    ),
    "shared with the root": Way(
        ModuleWrapPolicy({Layer, nn.Embedding}),
        lambda m: [(layer, {}) for layer in m.layers],
        case=lambda: small(tied=True),
        fix_shared=True,
    ),
}


def _both(way: Way, look: Callable[[Case], _Seen]) -> list[_Seen]:
    """Results of `look` for the policy's model and the model sharded by hand."""
    seen = []
    for shard in (way.shard, way.shard_by_hand):
        with fake_world(2):
            torch.manual_seed(0)
            case = way.case()
            shard(case.model, init_device_mesh("cpu", (2,)))
            seen.append(look(case))
    return seen


@pytest.mark.parametrize("name", WAYS)
def test_policy_groups_equal_groups_sharded_by_hand(name: str) -> None:
    ours, by_hand = _both(WAYS[name], lambda case: groups_of(case.model))
    assert ours == by_hand


def _build(case: str, device: str) -> nn.Module:
    with torch.device(device):
        return CASES[case]().model


@pytest.mark.parametrize("case", ["uneven", "odd_sizes", "lora", "mixture"])
@pytest.mark.parametrize(
    "shape, arguments",
    [((3,), {}), ((2, 4), {}), ((4,), {"shard_placement_fn": columns}), ((4,), {"mp_policy": BF16})],
    ids=["three ranks", "hsdp", "columns", "bf16"],
)
@pytest.mark.filterwarnings("ignore::compile_fsdp.errors.MixedFrozenWarning")
def test_plan_equals_groups_and_bytes_of_torch(case: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Compare a plan on the meta device with torch's groups on the CPU."""
    with fake_world(shape[0] * (shape[1] if len(shape) > 1 else 1), rank=1):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        # 40 also selects `inp` of odd_sizes (45 elements), which has no blocks.
        policy = SizePolicy(40)
        planned = plan(_build(case, "meta"), policy, mesh=mesh, **arguments)
        model = _build(case, "cpu")
        torch_groups = _by_hand(model, planned.groups, mesh, arguments)
    assert [(group.parameters, group.bytes_per_rank) for group in planned.groups] == torch_groups
    everything = {id(p): p for p in _build(case, "meta").parameters()}.values()
    assert sum(group.numel for group in planned.groups) == sum(parameter.numel() for parameter in everything)


def _by_hand(model: nn.Module, groups: Any, mesh: DeviceMesh, arguments: dict[str, Any]) -> list[tuple[Any, int]]:
    for group in groups:
        torch_fully_shard(model.get_submodule(group.fqns[0]), mesh=mesh, **arguments)
    found = {}
    for each in groups_of(model):
        (torch_group,) = each["groups"]
        found[each["modules"][0]] = tuple(torch_group["parameters"]), torch_group["bytes_per_rank"]
    return [found[group.fqns[0]] for group in groups]


def test_plan_bytes_of_tensor_parallel_parameters_equal_torch() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _build("mlp", "cpu")
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel()})
        planned = plan(model, mesh=mesh["dp"])
        by_hand = _by_hand(model, planned.groups, mesh["dp"], {})
    assert [(group.parameters, group.bytes_per_rank) for group in planned.groups] == by_hand


@pytest.mark.parametrize("case", ["nested", "llama", "lora"])
def test_planning_leaves_the_model_untouched(case: str) -> None:
    model = CASES[case]().model
    before = snapshot(model)
    with fake_world(2):
        plan(model, SizePolicy(50), mixed_precision_overrides=(nn.LayerNorm,), mp_policy=BF16)
    assert snapshot(model) == before


def test_plan_is_equal_on_all_ranks() -> None:
    texts = set()
    for rank in range(4):
        with fake_world(4, rank=rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            texts.add(str(plan(_build("odd_sizes", "meta"), SizePolicy(8), mesh=mesh["dp"], mp_policy=BF16)))
    assert len(texts) == 1


def test_policy_arguments_override_root_arguments() -> None:
    halves = CustomPolicy(lambda m: isinstance(m, Layer) and {"reshard_after_forward": 2})
    with fake_world(4):
        planned = plan(
            Small(), halves | ModuleWrapPolicy({nn.Linear}), reshard_after_forward=False, mp_policy=BF16
        )
    arguments = {group.name: group.kwargs["reshard_after_forward"] for group in planned.groups}
    below = {f"layers.{i}.linear": False for i in (0, 1)}
    assert arguments == {"layers.0": 2, "layers.1": 2, **below, "head": False, "the root": False}
    assert all(group.kwargs["mp_policy"] is BF16 for group in planned.groups)


def test_ignored_parameters_are_in_no_group() -> None:
    model: Any = _build("mlp", "meta")
    model.out.weight = nn.Parameter(model.layers[0].up.weight[:3])
    model.out.bias = model.inp.bias  # ignored, because it belongs to the ignored inp
    own = {model.layers[1].scale}
    groups = plan(model, ignored_modules=[model.inp, model.layers[0]], ignored_params=own).groups
    assert [group.fqns for group in groups] == [("layers.1",), ("",)]
    assert "layers.1.scale" not in groups[0].parameters and "layers.1.up.weight" in groups[0].parameters
    assert groups[1].parameters == ("out.weight",)
    ignored = {*model.inp.parameters(), *model.layers[0].parameters(), *own}
    assert [group.kwargs["ignored_params"] for group in groups] == [ignored, ignored]


def test_world_size_comes_from_the_environment_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert [group.bytes_per_rank for group in plan(model).groups] == [256, 256, 0]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert [group.bytes_per_rank for group in plan(model).groups] == [64, 64, 0]


def test_plan_then_apply_equals_auto_shard() -> None:
    found = []
    for two_steps in (False, True):
        with fake_world(2):
            model = _build("mlp", "cpu")
            sharded = apply(plan(model, mp_policy=BF16)) if two_steps else auto_shard(model, mp_policy=BF16)
            assert sharded is model
            found.append(groups_of(model))
    assert found[0] == found[1]


def test_policies_receive_root_arguments_and_all_ignored_modules() -> None:
    got: list[Any] = []

    class Own:
        def select(self, root: nn.Module, ignored: Any, root_kwargs: Any) -> Any:
            got.append((root, set(ignored), dict(root_kwargs)))
            return {root.out: {}}

    model = _build("mlp", "meta")
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        plan(model, Own(), mesh=mesh, ignored_modules=[model.layers], mp_policy=BF16)  # type: ignore[list-item]
    assert got == [(model, set(model.layers.modules()), {"mesh": mesh, "mp_policy": BF16})]  # type: ignore[union-attr]


def test_plan_prints_a_table() -> None:
    ends = CustomPolicy(lambda module: getattr(module, "weight", torch.empty(0)).shape == (16, 8))
    kept = CustomPolicy(lambda module: isinstance(module, Block) and {"reshard_after_forward": False})
    policy, model = ends | ModuleWrapPolicy({Block}) | kept, _build("tied_ends", "meta")
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        planned = plan(model, policy, mesh=mesh, mixed_precision_overrides=(nn.LayerNorm,), fix_shared=True)
    assert_expected_inline(str(planned), """\
FQN                class              parameters  bytes per rank  kwargs
[embedding, head]  Embedding, Linear         128             256
block.norm         LayerNorm                  16              32  mp_policy=MixedPrecisionPolicy()
block              Block                     424             848  reshard_after_forward=False
norm               LayerNorm                  16              32  mp_policy=MixedPrecisionPolicy()
the root           TiedEnds                    0               0  mesh=cpu(replicate=2, shard=2)
5 groups over 2 ranks: 584 parameters, 1,168 bytes per rank
in full precision: block.norm, norm""")
