"""A step is replayed while its conditions hold, and goes to Dynamo after a change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

import compile_fsdp
from compile_fsdp.replay import conditions
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.models.blockwise import shard_blocks
from helpers.models.global_settings import deterministic
from helpers.models.replays import compile_with_replay, count_replays
from helpers.ranks.tests import on_ranks

pytestmark = pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")


@dataclass
class _Settings:
    shift: float = 0.25


def _activation(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def _other_activation(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


class _Block(nn.Module):
    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.extra = nn.ModuleDict()
        self.settings = settings
        self.scale = 2.0
        self.shifts = [0.5]
        self.names = {2: "two"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.linear(x)) * self.scale + self.settings.shift + max(self.names)
        for shift in self.shifts:
            x = x + shift
        for module in self.extra.values():
            x = module(x)
        if self.training:
            x = x * 1.5
        if hasattr(self, "bonus"):
            x = x + self.bonus
        return _activation(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(_Settings())])

    def forward(self, x: torch.Tensor, twice: bool = False, extras: Any = None, more: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * 3 if extras is None else x
        x = x * 5 if more is None else x
        return x * 2 if twice else x


@dataclass
class _Step:
    """One training step, which a change may modify."""

    model: Any
    x: torch.Tensor
    kwargs: dict[str, Any]
    around: AbstractContextManager[Any]
    loss: Callable[[torch.Tensor], torch.Tensor]
    retain_graph: bool = False
    around_backward: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def block(self) -> Any:
        return self.model.blocks[0]

    def run(self) -> list[torch.Tensor | None]:
        with self.around:
            loss = self.loss(self.model(self.x, **self.kwargs))
        with self.around_backward:
            loss.backward(retain_graph=self.retain_graph)
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [grad if grad is None else grad.full_tensor().clone() for grad in grads]


def _shard(source: _Model, fully_shard: Any) -> Any:
    return shard_blocks(copy.deepcopy(source), fully_shard)


def _make(source: _Model, replay: bool = True) -> Any:
    model = _shard(source, compile_fsdp.fully_shard)
    arguments = {"backend": "compile_fsdp", "fullgraph": True, "options": {"inner_backend": "aot_eager"}}
    if replay:
        compile_with_replay(model, **arguments)
    else:
        model.compile(**arguments)
    return model


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _step(model: Any) -> _Step:
    torch.manual_seed(1)
    model.zero_grad()
    return _Step(model, torch.randn(3, 4), {"extras": [], "more": {}}, nullcontext(), _mean)


class _OtherReLU(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0


def _replace_by_class_of_the_same_name(step: _Step) -> None:
    _OtherReLU.__module__, _OtherReLU.__qualname__ = nn.ReLU.__module__, nn.ReLU.__qualname__
    step.block.act = _OtherReLU()


def _cast_under_autocast(step: _Step) -> None:
    step.around = torch.autocast("cpu", torch.bfloat16)
    step.x = step.x.to(torch.bfloat16)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _all_eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _with_other_activation() -> Iterator[None]:
    global _activation
    own, _activation = _activation, _other_activation
    try:
        yield
    finally:
        _activation = own


def _accumulate(step: _Step) -> None:
    step.model.set_requires_gradient_sync(False)
    step.run()
    step.model.set_requires_gradient_sync(True)


_Changes = dict[str, Callable[[_Step], object]]

# Changes between two steps that affect the forward.
FORWARD: _Changes = {
    "eval": lambda step: step.model.eval(),
    "number": lambda step: setattr(step.block, "scale", 3.0),
    "setting": lambda step: setattr(step.block.settings, "shift", 0.75),
    "longer list": lambda step: step.block.shifts.append(1.0),
    "list item": lambda step: step.block.shifts.__setitem__(0, 1.0),
    "key": lambda step: setattr(step.block, "names", {3: "two"}),
    "new attribute": lambda step: setattr(step.block, "bonus", 1.0),
    "forward of an instance": lambda step: setattr(
        step.block.linear, "forward", MethodType(lambda self, x: x @ self.weight, step.block.linear)
    ),
    "pre-hook": lambda step: step.block.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "other module": lambda step: setattr(step.block, "act", nn.Tanh()),
    "more modules": lambda step: step.block.extra.update({"more": nn.Tanh()}),
    "class of the same name": _replace_by_class_of_the_same_name,
    "frozen": lambda step: step.block.linear.bias.requires_grad_(False),
    "more rows": lambda step: setattr(step, "x", torch.randn(5, 4)),
    "dtype": _cast_under_autocast,
    "strides": lambda step: setattr(step, "x", step.x.t().contiguous().t()),
    "input gradient": lambda step: setattr(step, "x", step.x.clone().requires_grad_()),
    "argument": lambda step: step.kwargs.update(twice=True),
    "no list": lambda step: step.kwargs.update(extras=None),
    "no dict": lambda step: step.kwargs.update(more=None),
    "autocast": lambda step: setattr(step, "around", torch.autocast("cpu", torch.bfloat16)),
    "deterministic": lambda step: setattr(step, "around", deterministic()),
    "function mode": lambda step: setattr(step, "around", _Mode()),
    "default device": lambda step: setattr(step, "around", torch.device("cpu")),
    "stance": lambda step: setattr(step, "around", _all_eager()),
    "global function": lambda step: setattr(step, "around", _with_other_activation()),
    "reshard_after_forward": lambda step: step.block.set_reshard_after_forward(False),
    "unsharded": lambda step: step.block.unshard(),
}

# Changes between two steps that affect only the backward.
BACKWARD: _Changes = {
    "gradient strides": lambda step: setattr(step, "loss", torch.sum),
    "not reduced": lambda step: step.model.set_requires_gradient_sync(False),
    "accumulated": _accumulate,
    "reshard_after_backward": lambda step: step.model.set_reshard_after_backward(False),
    "divided": lambda step: step.block.set_gradient_divide_factor(4.0),
    "kept graph": lambda step: setattr(step, "retain_graph", True),
    "anomaly mode": lambda step: setattr(step, "around_backward", torch.autograd.set_detect_anomaly(True)),
}

HOOK: _Changes = {"hook": lambda step: step.block.linear.register_forward_hook(lambda module, args, output: output * 2)}

# Equal values in new objects.
NONE: _Changes = {
    "nothing": lambda step: None,
    "new settings": lambda step: setattr(step.block, "settings", _Settings()),
    "new list": lambda step: setattr(step.block, "shifts", [0.5]),
}
CHANGES = {**FORWARD, **BACKWARD, **HOOK, **NONE}


def _models() -> tuple[Any, Any]:
    """Equal models by eager FSDP2 and with replay."""
    torch.manual_seed(0)
    source = _Model()
    return _shard(source, torch_fully_shard), _make(source)


def _run(models: tuple[Any, Any], change: Callable[[_Step], object]) -> tuple[bool, bool, bool]:
    """Whether forward and backward of a changed step are replayed, and match eager FSDP2."""
    grads = []
    for model in models:
        step = _step(model)
        change(step)
        before = count_replays(models[1])
        grads.append(step.run())
    forward, backward = (now > then for now, then in zip(count_replays(models[1]), before, strict=True))
    is_right = all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]
    return forward, backward, is_right


def _path(name: str) -> tuple[bool, bool, bool]:
    models = _models()
    for _ in range(2):
        _step(models[1]).run()
    assert count_replays(models[1]) == (1, 1)
    return _run(models, CHANGES[name])


# Changes, and whether forward and backward are replayed after each of them.
GROUPS = {"forward": (FORWARD, False, False), "backward": (BACKWARD, True, False), "none": (NONE, True, True)}


@pytest.mark.parametrize("group", GROUPS)
@on_ranks(1)
def test_graphs_are_replayed_until_a_change_affects_them(rank: int, group: str) -> None:
    changes, *are_replayed = GROUPS[group]
    assert {name: _path(name) for name in changes} == dict.fromkeys(changes, (*are_replayed, True))


class _Layout(nn.Module):
    """Reads its result in a layout, which Dynamo compares as a whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.linear, self.mesh, self.layout = nn.Linear(4, 4), mesh, Shard(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(self.linear(x), self.mesh, [Replicate()])
        return whole.redistribute(placements=[self.layout]).to_local().square().sum()  # type: ignore[no-any-return]


@on_ranks(2, since="2.13")
def test_other_placement_is_traced(rank: int) -> None:
    model = compile_fsdp.fully_shard(_Layout(init_device_mesh("cpu", (2,))))
    compile_with_replay(model, backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    losses = []
    for dim in (0, 0, 0, 1):
        model.layout = Shard(dim)
        losses.append(model(x))
        losses[-1].backward()
    forward, _ = count_replays(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.equal(losses[-1].detach(), model(x))
    assert forward == 2


@on_ranks(1)
def test_first_forward_hook_stops_forward_replay(rank: int) -> None:
    """Dynamo runs its cached graph, because skip_nnmodule_hook_guards hides a first hook."""
    assert _path("hook")[:2] == (False, True)


def _path_without(kind: str, name: str) -> bool:
    """Whether a changed forward is replayed without the conditions of one kind."""
    init = conditions.Conditions.__init__

    def init_without(self: conditions.Conditions, *args: Any) -> None:
        init(self, *args)
        self.conditions = [each for each in self.conditions if each.kind != kind]

    with mock.patch.object(conditions.Conditions, "__init__", init_without):
        return _path(name)[0]


# Kind of condition, and a change that only this kind detects.
ALONE = (
    *(("CONSTANT_MATCH", "number"), ("CONSTANT_MATCH", "eval"), ("SEQUENCE_LENGTH", "longer list")),
    *(("EMPTY_NN_MODULE_HOOKS_DICT", "hook"), ("NOT_PRESENT_IN_GENERIC_DICT", "forward of an instance")),
    ("TENSOR_MATCH", "strides"),
)


@on_ranks(1)
def test_changed_forward_is_replayed_without_the_condition_that_detects_it(rank: int) -> None:
    assert [(kind, name) for kind, name in ALONE if not _path_without(kind, name)] == []


class _Doubled(_Mode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.tanh else output


@pytest.mark.parametrize(
    ("names", "are_replayed"),
    [
        # Recorded under a default device, which is compared by value.
        (("device", "device", "meta", "device"), (False, True, False, True)),
        # Never recorded under any other mode.
        (("doubled", "doubled", "mode", "doubled"), (False, False, False, False)),
    ],
)
@on_ranks(1)
def test_step_is_replayed_under_a_default_device_only(
    rank: int, names: tuple[str, ...], are_replayed: tuple[bool, ...]
) -> None:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "device": lambda: torch.device("cpu"),
        "meta": lambda: torch.device("meta"),
        "mode": _Mode,
        "doubled": _Doubled,
    }
    models = _models()
    for name, is_replayed in zip(names, are_replayed, strict=True):
        forward, _, is_right = _run(models, lambda step, name=name: setattr(step, "around", contexts[name]()))
        assert (forward, is_right) == (is_replayed, True), name


@on_ranks(1)
def test_model_without_a_bundle_does_not_replay(rank: int) -> None:
    assert _make(_Model(), replay=False)._compile_fsdp_hooks.hooks.root.replay is None
