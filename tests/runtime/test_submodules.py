"""Submodules that are called or compiled separately train as with eager FSDP2."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp.errors import UnsupportedFeatureError
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.stacks import Block
from helpers.parity.check import full
from helpers.parity.twins import AOT_EAGER, build_both
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import collectives_of
from helpers.ranks.tests import on_ranks
from helpers.releases.differences import PRINTS_GUARDED_PARAMETERS
from helpers.releases.skip import skip_before


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if with_head else x


def _build(fully_shard: Any, together: bool) -> Any:
    torch.manual_seed(0)
    model: Any = _Model()
    ends = [[model.norm, model.head]] if together else [model.norm, model.head]
    for module in (*model.layers, *ends, model):
        fully_shard(module)
    return model


def _whole(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _head_in_chunks(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    hidden = model(x, with_head=False)
    return torch.stack([model.head(chunk).square().mean() for chunk in hidden.chunk(3)]).sum()


def _layer_alone(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return _whole(model, x, step) if step % 2 == 0 else model.layers[1](x).square().mean()  # type: ignore[no-any-return]


def _layers_and_head(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    if step == 0:
        return _whole(model, x, step)
    for layer in model.layers[:2]:
        x = layer(x)
    return model.head(x).square().mean()  # type: ignore[no-any-return]


def _checkpointed(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    if step == 0:
        return _whole(model, x, step)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().mean()


def _toggled(model: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    model.head.set_reshard_after_forward(step % 2 == 0)
    return _head_in_chunks(model, x, step)


_PROGRAMS: dict[str, Callable[[Any, torch.Tensor, int], torch.Tensor]] = {
    each.__name__.strip("_"): each
    for each in (_head_in_chunks, _layer_alone, _layers_and_head, _checkpointed, _toggled)
}


def _compile(model: Any, program: Any, way: str) -> Any:
    """Compile the root, each sharded module or a function; return the program to train with."""
    if way == "function":
        return torch.compile(program, backend="compile_fsdp", options=AOT_EAGER)
    for module in (*model.layers, model.norm, model.head, model) if way == "each" else (model,):
        module.compile(backend="compile_fsdp", options=AOT_EAGER)
    return program


def _train(model: Any, program: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[torch.Tensor] = []
    for step in range(4):
        torch.manual_seed(step)
        loss = program(model, torch.randn(6, 4), step)
        loss.backward()
        results.append(loss.detach())
        grads = [parameter.grad for parameter in model.parameters()]
        results += [torch.zeros(1) if grad is None else grad.full_tensor() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.full_tensor().detach() for parameter in model.parameters()]


def _as_eager(rank: int, name: str, way: str, together: bool) -> list[int]:
    """Return the positions of results that differ between eager and compiled training."""
    program = _PROGRAMS[name]
    eager, ours = (_build(shard, together) for shard in (torch_fully_shard, compile_fsdp.fully_shard))
    expected, found = _train(eager, program), _train(ours, _compile(ours, program, way))
    pairs = enumerate(zip(found, expected, strict=True))
    return [i for i, (one, other) in pairs if not torch.equal(one, other)]


_FAST = {("head_in_chunks", "function", True), ("layer_alone", "each", True), ("toggled", "each", False)}


@pytest.mark.parametrize(
    ("name", "way", "together"),
    [
        pytest.param(*case, marks=() if case in _FAST else pytest.mark.slow)
        for case in itertools.product(_PROGRAMS, ("root", "each", "function"), (False, True))
    ],
)
def test_separately_called_or_compiled_modules_match_eager(name: str, way: str, together: bool) -> None:
    if PRINTS_GUARDED_PARAMETERS and (name, way) == ("toggled", "function"):
        skip_before("2.12")
    assert run_ranks(2, _as_eager, name, way, together) == [[], []]


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_several_fsdp_roots_in_one_graph_match_eager(rank: int, inner_backend: str) -> None:
    """Two layers are sharded, and not their parent."""
    results: list[list[torch.Tensor]] = []
    issued: list[list[int]] = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        model: Any = _Model()
        for layer in model.layers[:2]:
            fully_shard(layer)
        run = model
        if fully_shard is compile_fsdp.fully_shard:
            options = {"inner_backend": inner_backend}
            run = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        counts = []
        for step in range(3):
            torch.manual_seed(step)
            loss = run(torch.randn(6, 4)).square().mean()
            counts.append(len(collectives_of(loss.backward)))
            optimizer.step()
            optimizer.zero_grad()
        issued.append(counts)
        results.append([full(each) for each in model.parameters()])
    differences = [(one - other).abs().max().item() for one, other in zip(*results, strict=True)]
    assert max(differences) <= (0 if inner_backend == "aot_eager" else 1e-6)
    assert issued[0] == issued[1]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(torch.relu(self.embedding(x)))[0]).square().mean()  # type: ignore[no-any-return]


@on_ranks(2)
def test_lstm_that_is_sharded_by_itself_runs_eagerly_between_graphs(rank: int) -> None:
    def build(fully_shard: Any) -> Any:
        model = _Recurrent()
        fully_shard(model.lstm)
        return fully_shard(model)

    models = build_both(build, fullgraph=False)
    for model in models:
        torch.manual_seed(rank)
        for _ in range(2):
            model(torch.randn(2, 3, 4)).backward()
    assert all(map(torch.equal, *([full(each.grad) for each in model.parameters()] for model in models)))


def test_lstm_in_a_larger_group_is_refused() -> None:
    with fake_world(2):
        model = compile_fsdp.fully_shard(_Recurrent())
        model.compile(backend="compile_fsdp", options=AOT_EAGER)
        with pytest.raises(UnsupportedFeatureError, match=r"the root .* shard the LSTM by itself"):
            model(torch.randn(2, 3, 4))


class _Reentrant(nn.Module):
    """Its checkpoint runs a backward inside of the backward, and in it a further one if nested."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.first, self.second, self.outer, self.inner = (nn.Linear(4, 4) for _ in range(4))
        self.nested = nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()
        return checkpoint(self._rest if self.nested else self.inner, hidden, use_reentrant=True).square().mean()

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.outer(x).tanh(), use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("nested", "compiled"), [(False, True), (True, True), (True, False)])
@on_ranks(2)
def test_end_of_a_backward_inside_of_another_leaves_the_outer_ones_parameters(
    rank: int, nested: bool, compiled: bool
) -> None:
    found = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        model: Any = _Reentrant(nested)
        for module in (model.inner, model.outer, model):
            fully_shard(module)
        if compiled and fully_shard is compile_fsdp.fully_shard:
            model.inner.compile(backend="compile_fsdp", options=AOT_EAGER)
        torch.manual_seed(rank)
        for _ in range(2):
            model(torch.randn(3, 4)).backward()
        found.append([None if each.grad is None else full(each.grad) for each in model.parameters()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Cache:
    """An object of a class that FSDP2 does not look into."""


class _Cached(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), _Cache()


class _AfterCached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Cached(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.first(x)
        return self.last(hidden)  # type: ignore[no-any-return]


def test_frozen_first_module_may_return_unknown_objects_beside_tensors() -> None:
    with fake_world(2):
        model = compile_whole(shard_blocks(_AfterCached()), **AOT_EAGER)
        model(torch.ones(2, 4)).sum().backward()
        assert model.last.weight.grad is not None
