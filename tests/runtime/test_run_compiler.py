"""Compilation runs without garbage collection, and without a new piece of stack for each call."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

import compile_fsdp
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.run_compiler import run_compiler
from helpers.models.blockwise import compile_whole
from helpers.ranks.fake_world import fake_world

is_enabled: list[bool] = []  # whether the collector was enabled when each graph was compiled


@register_backend
def watching_the_collector(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    is_enabled.append(gc.isenabled())
    return graph.forward


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    is_enabled.clear()
    with fake_world(2):
        yield
    gc.enable()


class _Breaks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _compiled(layer: nn.Module) -> nn.Module:
    model = compile_fsdp.fully_shard(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4)))
    return compile_whole(model, inner_backend="watching_the_collector")  # type: ignore[no-any-return]


def test_garbage_collector_is_paused_while_graphs_are_compiled() -> None:
    model = _compiled(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    assert gc.isenabled()
    loss.backward()
    assert gc.isenabled()
    assert is_enabled == [False, False]


def test_garbage_collector_is_paused_while_a_first_call_loads_a_bundle() -> None:
    class Replay:
        def call(self, module: nn.Module, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
            is_enabled.append(gc.isenabled())
            return args[0]

    model = _compiled(nn.Linear(4, 4))
    module_hooks_of(model).hooks.root.replay = Replay()  # type: ignore[assignment]
    for _ in range(2):
        model(torch.ones(2, 4))
    assert is_enabled == [False, True]  # in the first call, in the second


def test_garbage_collector_is_enabled_after_a_failed_trace() -> None:
    model = _compiled(_Breaks(4, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(2, 4))
    assert gc.isenabled()


def test_disabled_garbage_collector_stays_disabled() -> None:
    model = _compiled(nn.Linear(4, 4))
    gc.disable()
    model(torch.ones(2, 4)).sum().backward()
    assert not gc.isenabled()


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    is_frozen = gc.get_freeze_count() > 0  # by the suite
    gc.unfreeze()
    yield
    if is_frozen:
        gc.freeze()


class _Node:
    def __init__(self) -> None:
        self.itself = self


def _is_old(node: _Node) -> bool:
    return any(each is node for each in gc.get_objects(generation=2))


def _make(count: int) -> tuple[_Node, weakref.ref[_Node]]:
    """Return a live object and an object that is garbage, of `count` new objects."""
    nodes = [_Node() for _ in range(count)]
    return nodes[0], weakref.ref(nodes[1])


@pytest.mark.usefixtures("_nothing_frozen")
def test_many_new_objects_are_not_collected_but_moved_to_the_oldest_generation() -> None:
    kept, garbage = run_compiler(partial(_make, 200_000))
    assert _is_old(kept) and garbage() is not None
    gc.collect()
    assert garbage() is None


@pytest.mark.usefixtures("_nothing_frozen")
def test_few_new_objects_stay_young() -> None:
    gc.collect()
    kept, _ = run_compiler(partial(_make, 1000))
    assert not _is_old(kept)


@pytest.mark.usefixtures("_nothing_frozen")
def test_objects_that_the_user_froze_stay_frozen() -> None:
    kept: list[int] = []
    gc.freeze()
    run_compiler(partial(_make, 200_000))
    assert not any(each is kept for each in gc.get_objects())  # of generations, which have no frozen objects


@pytest.mark.usefixtures("_nothing_frozen")
def test_objects_of_many_traces_are_collected() -> None:
    is_garbage_left = [run_compiler(partial(_make, 200_000))[1]() is not None for _ in range(25)]
    assert is_garbage_left.count(False) == 1


def test_calls_at_any_depth_share_a_chunk_of_the_stack() -> None:
    def call_often_at_each_depth(depth: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(1000):
            _do_nothing()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return max(faults, call_often_at_each_depth(depth - 1)) if depth else faults

    assert run_compiler(partial(call_often_at_each_depth, 300)) < 1000


def _do_nothing() -> None:
    pass
