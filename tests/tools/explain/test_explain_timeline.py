"""Timeline and memory estimates of hand-made events and graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes.analysis.collectives import CAST
from compile_fsdp.tools.explain.events import Event, Kind
from compile_fsdp.tools.explain.memory import unsharded_bytes
from compile_fsdp.tools.explain.names import NO_MODULE, GraphNames, GroupFacts, module_names
from compile_fsdp.tools.explain.timeline import eager_bytes, place
from compile_fsdp.wrap.tree import ROOT
from helpers.graphs.build import GraphBuilder, aten, c10d


def event(kind: Kind, seconds: float = 0.0, collective: int = -1, reads: str = "") -> Event:
    return Event(kind, "m", (reads,) if reads else (), (), 0, seconds, 0, collective)


def group(name: str, size: int, reshards: bool = True) -> GroupFacts:
    return GroupFacts(name, (f"{name}.w",), (size,), size // 4, size // 4, 4, reshards)


def test_wait_exposes_communication_that_compute_does_not_overlap() -> None:
    events = [event(Kind.GATHER, 5.0, 0), event(Kind.COMPUTE, 3.0), event(Kind.WAIT, 0.0, 0), event(Kind.COMPUTE, 1.0)]
    placed = place([events], [])
    assert [each.start_s for each in placed] == [0, 0, 3, 5]
    assert [each.exposed_s for each in placed] == [0, 0, 2, 0]


def test_collectives_run_one_after_another() -> None:
    events = [
        event(Kind.GATHER, 5.0, 0),
        event(Kind.REDUCE, 2.0, 1),
        event(Kind.WAIT, 0.0, 1),
        event(Kind.WAIT, 0.0, 0),
    ]
    placed = place([events], [])
    assert [each.start_s for each in placed] == [0, 5, 0, 7]
    assert [each.exposed_s for each in placed] == [0, 0, 7, 0]
    assert [each.at_s for each in placed] == [0, 0, 0, 7]


def test_graphs_run_in_order_and_may_reuse_collective_numbers() -> None:
    one = [event(Kind.GATHER, 1.0, 0), event(Kind.WAIT, 0.0, 0), event(Kind.COMPUTE, 2.0)]
    placed = place([one, one], [])
    assert [each.start_s for each in placed] == [0, 0, 1, 3, 3, 4]
    assert [each.graph for each in placed] == [0, 0, 0, 1, 1, 1]


def test_eager_memory_holds_current_and_next_group() -> None:
    events = [event(Kind.COMPUTE, 1.0, reads=f"{name}.w") for name in "abc"]
    groups = [group("a", 100), group("b", 20), group("c", 3)]
    assert eager_bytes(events, groups, is_backward=False) == [220, 43, 6]  # the gather and its copy at the first use


def test_eager_memory_holds_root_from_forward_to_backward() -> None:
    root, block = group("r", 1000, reshards=False), group("a", 100)
    forward = [event(Kind.COMPUTE, 1.0, reads=name) for name in ("r.w", "a.w", "")]
    assert eager_bytes(forward, [root, block], is_backward=False) == [2100, 1200, 1000]
    ends = replace(event(Kind.COMPUTE, 1.0), gradients=("r.w",)), event(Kind.COMPUTE, 1.0)  # reduces nothing
    backward = [*(event(Kind.COMPUTE, 1.0, reads=name) for name in ("", "a.w")), *ends]
    assert eager_bytes(backward, [root, block], is_backward=True) == [1100, 1200, 1000, 0]


def _input(build: GraphBuilder, position: int, shape: list[int]) -> Any:
    node = build.input(f"in{position}", shape)
    node.meta["desc"] = SimpleNamespace(idx=position)
    return node


NAMES = GraphNames(shards={0: "w"}, unsharded={1: "w"}, gradients={})


def test_gathered_buffer_lives_until_last_read_of_its_views(build: GraphBuilder) -> None:
    shard, x = _input(build, 0, [4]), _input(build, 2, [4, 4])
    gathered = build.call(c10d.all_gather_into_tensor.default, shard, 4, "0")
    waited = build.call(c10d.wait_tensor.default, gathered)
    view = build.call(aten.view.default, waited, [4, 4])
    used = build.call(aten.mm.default, x, view)
    again = build.call(aten.relu.default, used)
    build.graph.output((again,))
    assert unsharded_bytes(build.graph, NAMES) == [0, 0, 64, 64, 64, 64, 0, 0]


def test_copy_of_gathered_buffer_counts_in_addition(build: GraphBuilder) -> None:
    shard = _input(build, 0, [4])
    waited = build.call(c10d.wait_tensor.default, build.call(c10d.all_gather_into_tensor.default, shard, 4, "0"))
    half = build.call(CAST, waited, torch.bfloat16)
    build.graph.output((build.call(aten.relu.default, half),))
    assert unsharded_bytes(build.graph, NAMES) == [0, 64, 64, 64 + 32, 32, 0]


@pytest.mark.parametrize("is_open", [True, False])
def test_parameter_is_alive_inside_its_unshard_window(build: GraphBuilder, is_open: bool) -> None:
    leaf, value = _input(build, 1, [16]), _input(build, 2, [16])
    build.call(resize_storage_bytes_, leaf, 64)
    build.call(copy_, leaf, value)
    used = build.call(aten.relu.default, leaf)
    if not is_open:
        build.call(resize_storage_bytes_, leaf, 0)
    build.graph.output((used,))
    assert unsharded_bytes(build.graph, NAMES) == [0, 0, 64, 64, 64, 64 if is_open else 0, *([] if is_open else [0])]


def test_parameter_unsharded_by_earlier_graph_is_alive_from_start(build: GraphBuilder) -> None:
    leaf = _input(build, 1, [16])
    used = build.call(aten.relu.default, leaf)
    build.call(resize_storage_bytes_, leaf, 0)
    build.graph.output((used,))
    assert unsharded_bytes(build.graph, NAMES) == [64, 64, 0, 0]


def test_computation_without_metadata_gets_module_of_its_operands_or_readers(build: GraphBuilder) -> None:
    gradient, zero = build.input("gradient", [4]), build.call(aten.full.default, [4], 0)
    nodes = [zero, build.call(aten.neg.default, gradient)]
    for _ in range(3):  # gate and up of block 1, and gate of block 0
        nodes.append(build.call(aten.maximum.default, nodes[-1], zero))
    nodes.append(build.call(aten.add.Tensor, nodes[3], nodes[2]))
    nodes.append(build.call(aten.add.Tensor, nodes[4], nodes[3]))
    nodes.append(build.call(aten.cos.default, nodes[4]))
    own = dict(zip(nodes[2:5], ("blocks.1.gate", "blocks.1.up", "mlp"), strict=True))
    names = module_names(build.graph, lambda node: own.get(node, ""), is_backward=True)
    assert [names[node] for node in nodes] == ["blocks.1.gate", ROOT, *own.values(), "blocks.1", "mlp", "mlp"]


@pytest.mark.parametrize("head", ["G['model'].head", "L['hooks'].fsdp_params[0]._module_info.module.head"])
@pytest.mark.parametrize("is_called", [True, False])
def test_forward_outside_of_modules_is_the_roots_unless_a_function_calls_the_root(is_called: bool, head: str) -> None:
    build = GraphBuilder()
    x = build.input("x", [4])
    inside, outside = build.call(aten.relu.default, x), build.call(aten.mean.default, x)
    stack = {"1": ("G['model']", None)} if is_called else {}
    inside.meta["nn_module_stack"] = {**stack, "2": (head, None)}
    outside.meta["stack_trace"] = 'File "train.py", line 1'
    names = module_names(build.graph, lambda node: "", is_backward=False)
    assert (names[inside], names[outside]) == ("head", NO_MODULE if is_called else ROOT)
