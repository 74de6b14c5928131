"""A step is replayed while its conditions hold, and goes to Dynamo after a change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.overrides import TorchFunctionMode

import compile_fsdp
from compile_fsdp.replay import conditions
from helpers.models.global_settings import deterministic
from helpers.models.replays import compile_with_replay, count_replays
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before


@pytest.fixture(autouse=True)
def _replays() -> None:
    skip_before("2.13")


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.linear(x)) * self.scale + self.settings.shift
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

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
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

    def run(self) -> list[torch.Tensor | None]:
        with self.around:
            loss = self.loss(self.model(self.x, **self.kwargs))
        with self.around_backward:
            loss.backward(retain_graph=self.retain_graph)
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [grad if grad is None else grad.full_tensor().clone() for grad in grads]


def _shard(source: _Model, fully_shard: Any) -> Any:
    model = copy.deepcopy(source)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


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
    return _Step(model, torch.randn(3, 4), {}, nullcontext(), _mean)


# Changes between two steps that affect the forward.


def _evaluation(step: _Step) -> None:
    step.model.eval()


def _number(step: _Step) -> None:
    step.model.blocks[0].scale = 3.0


def _setting(step: _Step) -> None:
    step.model.blocks[0].settings.shift = 0.75


def _list(step: _Step) -> None:
    step.model.blocks[0].shifts.append(1.0)


def _list_item(step: _Step) -> None:
    step.model.blocks[0].shifts[0] = 1.0


def _new_attribute(step: _Step) -> None:
    step.model.blocks[0].bonus = 1.0


def _own_forward(step: _Step) -> None:
    step.model.blocks[0].linear.forward = MethodType(lambda self, x: x @ self.weight, step.model.blocks[0].linear)


def _hook(step: _Step) -> None:
    step.model.blocks[0].linear.register_forward_hook(lambda module, args, output: output * 2)


def _hook_before(step: _Step) -> None:
    step.model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _other_module(step: _Step) -> None:
    step.model.blocks[0].act = nn.Tanh()


def _more_modules(step: _Step) -> None:
    step.model.blocks[0].extra["more"] = nn.Tanh()


def _class_of_the_same_name(step: _Step) -> None:
    class Tanh(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3.0

    Tanh.__module__, Tanh.__qualname__ = nn.ReLU.__module__, nn.ReLU.__qualname__
    step.model.blocks[0].act = Tanh()


def _frozen(step: _Step) -> None:
    step.model.blocks[0].linear.bias.requires_grad_(False)


def _longer(step: _Step) -> None:
    step.x = torch.randn(5, 4)


def _other_dtype(step: _Step) -> None:
    step.around = torch.autocast("cpu", torch.bfloat16)
    step.x = step.x.to(torch.bfloat16)


def _other_strides(step: _Step) -> None:
    step.x = step.x.t().contiguous().t()


def _needs_gradient(step: _Step) -> None:
    step.x = step.x.clone().requires_grad_()


def _argument(step: _Step) -> None:
    step.kwargs["twice"] = True


def _autocast(step: _Step) -> None:
    step.around = torch.autocast("cpu", torch.bfloat16)


def _deterministic(step: _Step) -> None:
    step.around = deterministic()


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _mode(step: _Step) -> None:
    step.around = _Mode()


@contextmanager
def _all_eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def _stance(step: _Step) -> None:
    step.around = _all_eager()


def _code(step: _Step) -> None:
    step.around = _with_other_activation()


@contextmanager
def _with_other_activation() -> Iterator[None]:
    global _activation
    own, _activation = _activation, _other_activation
    try:
        yield
    finally:
        _activation = own


def _stays_unsharded(step: _Step) -> None:
    step.model.blocks[0].set_reshard_after_forward(False)


def _is_unsharded(step: _Step) -> None:
    step.model.blocks[0].unshard()


FORWARD = (
    *(_evaluation, _number, _setting, _list, _list_item, _new_attribute, _own_forward, _hook_before),
    *(_other_module, _more_modules, _class_of_the_same_name, _frozen, _longer, _other_dtype, _other_strides),
    *(_needs_gradient, _argument, _autocast, _deterministic, _mode, _stance, _code, _stays_unsharded, _is_unsharded),
)


# Changes between two steps that affect only the backward.


def _gradient_strides(step: _Step) -> None:
    step.loss = torch.sum


def _is_not_reduced(step: _Step) -> None:
    step.model.set_requires_gradient_sync(False)


def _accumulates(step: _Step) -> None:
    step.model.set_requires_gradient_sync(False)
    step.run()
    step.model.set_requires_gradient_sync(True)


def _stays_unsharded_after(step: _Step) -> None:
    step.model.set_reshard_after_backward(False)


def _divided(step: _Step) -> None:
    for block in step.model.blocks:
        block.set_gradient_divide_factor(4.0)


def _keeps_graph(step: _Step) -> None:
    step.retain_graph = True


def _anomalies(step: _Step) -> None:
    step.around_backward = torch.autograd.set_detect_anomaly(True)


BACKWARD = (
    *(_gradient_strides, _is_not_reduced, _accumulates, _stays_unsharded_after, _divided, _keeps_graph, _anomalies),
)


def _path(rank: int, name: str) -> tuple[bool, bool, bool]:
    """Whether forward and backward are replayed after a change, and match eager FSDP2."""
    change: Callable[[_Step], None] = globals()[name]
    torch.manual_seed(0)
    source = _Model()
    replayed, eager = _make(source), _shard(source, torch_fully_shard)
    for _ in range(2):
        _step(replayed).run()
    assert count_replays(replayed) == (1, 1)
    grads = []
    for model in (replayed, eager):
        step = _step(model)
        change(step)
        before = count_replays(replayed)
        grads.append(step.run())
        if model is replayed:
            forward, backward = (now > then for now, then in zip(count_replays(model), before, strict=True))
    is_right = all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]
    return forward, backward, is_right


def _nothing(step: _Step) -> None:
    pass


def _new_objects(step: _Step) -> None:
    """Replace settings and shifts with equal objects."""
    step.model.blocks[0].settings = _Settings()
    step.model.blocks[0].shifts = [0.5]


def _paths(rank: int, names: Sequence[str]) -> dict[str, tuple[bool, bool, bool]]:
    return {name: _path(rank, name) for name in names}


def _check(changes: Sequence[Callable[[_Step], None]], expected: tuple[bool, bool, bool]) -> None:
    names = [change.__name__ for change in changes]
    assert run_ranks(1, _paths, names) == [dict.fromkeys(names, expected)]


def test_no_graph_is_replayed_after_a_forward_change() -> None:
    _check(FORWARD, (False, False, True))


def test_only_the_forward_is_replayed_after_a_backward_change() -> None:
    _check(BACKWARD, (True, False, True))


def test_unchanged_step_is_replayed() -> None:
    _check((_nothing, _new_objects), (True, True, True))


def test_first_forward_hook_stops_forward_replay() -> None:
    """Dynamo runs its cached graph, because skip_nnmodule_hook_guards hides a first hook."""
    (path,) = run_ranks(1, _path, _hook.__name__)
    assert path[:2] == (False, True)


def _path_without(rank: int, kind: str, name: str) -> bool:
    """Whether a changed forward is replayed without the conditions of one kind."""
    init = conditions.Conditions.__init__

    def init_without(self: conditions.Conditions, *args: Any) -> None:
        init(self, *args)
        self.conditions = [each for each in self.conditions if each.kind != kind]

    conditions.Conditions.__init__ = init_without  # type: ignore[method-assign]
    try:
        return _path(rank, name)[0]
    finally:
        conditions.Conditions.__init__ = init  # type: ignore[method-assign]


# Kind of condition, and a change that only this kind detects.
ALONE = (
    *(("CONSTANT_MATCH", _number), ("CONSTANT_MATCH", _evaluation), ("SEQUENCE_LENGTH", _list)),
    *(("EMPTY_NN_MODULE_HOOKS_DICT", _hook), ("NOT_PRESENT_IN_GENERIC_DICT", _own_forward)),
    ("TENSOR_MATCH", _other_strides),
)


def _paths_without(rank: int, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    return [_path_without(rank, kind, name) for kind, name in pairs]


def test_changed_forward_is_replayed_without_the_condition_that_detects_it() -> None:
    pairs = [(kind, change.__name__) for kind, change in ALONE]
    assert run_ranks(1, _paths_without, pairs) == [[True] * len(pairs)]


def _has_replay(rank: int) -> bool:
    return _make(_Model(), replay=False)._compile_fsdp_hooks.hooks.root.replay is not None


def test_replay_option_disables_replay() -> None:
    assert run_ranks(1, _has_replay) == [False]
