"""Places of collectives: early enough, within their bounds, and never before their inputs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.collectives import is_collective
from compile_fsdp.passes.post_grad.schedule_collectives import schedule_collectives
from helpers.graphs.build import REDUCE, GraphBuilder, aten, c10d, gather, name_collectives, reduce
from helpers.graphs.lockstep import same_results
from helpers.graphs.render import render

# An (8, 8) product takes one second. A collective takes its latency.
MM_FLOPS = 2 * 8**3


def taking(latency: float) -> Costs:
    return Costs(latency=latency, comm_bandwidth=1e30, memory_bandwidth=1e30, flops=MM_FLOPS, rows=8)


class Model:
    """(8, 8) layers on two ranks, each layer's weight gathered where it is used."""

    def __init__(self, layers: int, rows: int = 8) -> None:
        self.build = GraphBuilder()
        self.x = self.build.input("x", (rows, 8))
        self.shards = [self.build.input(f"w{i}", (32,)) for i in range(layers)]
        self.saved = [self.build.input(f"h{i}", (rows, 8)) for i in range(layers)]

    def gather(self, layer: int) -> fx.Node:
        rows = gather(self.build, [self.shards[layer]], 2)[0]
        return self.build.call(aten.reshape.default, rows, [8, 8])

    def weight_gradient(self, layer: int, grad: fx.Node) -> fx.Node:
        return self.mm(self.build.call(aten.permute.default, self.saved[layer], [1, 0]), grad)

    def reduced(self, gradient: fx.Node, grad: fx.Node) -> list[fx.Node]:
        """Reduced gradients of a weight and a bias."""
        return reduce(self.build, [gradient, self.build.call(aten.sum.dim_IntList, grad, [0])], 2)

    def mm(self, left: fx.Node, right: fx.Node) -> fx.Node:
        return self.build.call(aten.mm.default, left, right)


def forward(layers: int = 3, rows: int = 8) -> fx.Graph:
    model = Model(layers, rows)
    x = model.x
    for layer in range(layers):
        x = model.mm(x, model.gather(layer))
    return model.build.output(x)


def backward(layers: int = 3, rows: int = 8) -> fx.Graph:
    """A backward that gathers each weight one layer early, as BACKWARD_PRE does."""
    model = Model(layers, rows)
    grad, gradients = model.x, []
    weight = model.gather(layers - 1)
    for layer in reversed(range(layers)):
        following = model.gather(layer - 1) if layer > 0 else weight
        gradient = model.weight_gradient(layer, grad)
        grad = model.mm(grad, weight)
        gradients += model.reduced(gradient, grad)
        weight = following
    graph = model.build.output(grad, *gradients)
    name_collectives(graph)
    return graph


def events(graph: fx.Graph) -> str:
    """The graph's products and collectives in order: g0 launches the gather of w0, u0 waits for it; r and v reduce."""
    found, numbers = [], {}
    for line in render(graph).splitlines():
        match = re.match(r"(%\d+).*? = (mm|all_gather_into_tensor|reduce_scatter_tensor|wait_tensor)\(([\w%]+)", line)
        if match is None:
            continue
        result, op, argument = match.groups()
        if op == "all_gather_into_tensor":
            numbers[result] = ("u", argument.removeprefix("w"))
            found.append("g" + argument.removeprefix("w"))
        elif op == "reduce_scatter_tensor":
            numbers[result] = ("v", str(sum(kind == "v" for kind, _ in numbers.values())))
            found.append("r" + numbers[result][1])
        else:
            found.append("mm" if op == "mm" else "".join(numbers[argument]))
    return " ".join(found)


def scheduled(graph: fx.Graph, latency: float, hoist: bool = True) -> str:
    report = schedule_collectives(graph, hoist=hoist, costs=taking(latency))
    graph.lint()
    assert dict(report.counts)["left_in_place"] == 0
    return events(graph)


def test_gather_is_hidden_behind_the_previous_product() -> None:
    graph = forward()
    assert events(graph) == "g0 u0 mm g1 u1 mm g2 u2 mm"
    assert scheduled(graph, latency=1) == "g0 g1 u0 mm g2 u1 mm u2 mm"


def receiving(bandwidth: float) -> Costs:
    return replace(taking(latency=0), comm_bandwidth=bandwidth)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1, "g0 u0 mm g1 mm u1 mm"), (2, "g0 g1 u0 mm mm u1 mm"), (3, "g0 g1 u0 mm mm u1 mm")]
)
def test_time_of_a_gather_follows_its_bytes(seconds: int, expected: str) -> None:
    model = Model(2)
    y = model.mm(model.x, model.gather(0))
    graph = model.build.output(model.mm(model.mm(y, y), model.gather(1)))
    schedule_collectives(graph, costs=receiving(bandwidth=4 * 32 / seconds))
    assert events(graph) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(1, "mm r0 mm v0 mm mm"), (2, "mm r0 mm mm v0 mm")])
def test_time_of_a_reduction_follows_its_bytes(seconds: int, expected: str) -> None:
    model = Model(1)
    gradients = model.reduced(model.weight_gradient(0, model.x), model.x)
    y = model.x
    for _ in range(3):
        y = model.mm(y, y)
    graph = model.build.output(y, *gradients)
    schedule_collectives(graph, costs=receiving(bandwidth=4 * 36 / seconds))
    assert events(graph) == expected


def test_graph_without_collectives_comes_back_untouched() -> None:
    model = Model(1)
    graph = model.build.output(model.mm(model.x, model.x))
    before = render(graph)
    assert dict(schedule_collectives(graph).counts) == {"collectives_scheduled": 0, "left_in_place": 0}
    assert render(graph) == before


def test_forward_gathers_one_group_ahead_however_slow_the_gather() -> None:
    assert scheduled(forward(4), latency=100) == "g0 g1 u0 mm g2 u1 mm g3 u2 mm u3 mm"


def test_gather_without_cost_is_not_launched_early() -> None:
    assert scheduled(forward(), latency=0) == "g0 u0 mm g1 u1 mm g2 u2 mm"


def test_backward_reduces_at_once_and_gathers_no_earlier_than_traced() -> None:
    graph = backward()
    assert events(graph) == "g2 u2 g1 u1 mm mm r0 v0 g0 u0 mm mm r1 v1 mm mm r2 v2"
    assert scheduled(graph, latency=1, hoist=False) == "g2 mm u2 mm r0 g1 mm v0 u1 mm r1 g0 mm v1 u0 mm r2 v2"


def test_backward_keeps_a_late_prefetch_late() -> None:
    assert scheduled(forward(), latency=100, hoist=False) == "g0 u0 mm g1 u1 mm g2 u2 mm"


def test_gradients_in_flight_are_no_more_than_the_largest() -> None:
    order = scheduled(backward(4), latency=100, hoist=False).split()
    flying = 0
    for event in order:
        flying += (event[0] == "r") - (event[0] == "v")
        assert flying <= 1


def test_collective_stays_behind_an_op_that_may_write_its_input() -> None:
    model = Model(2)
    y = model.mm(model.x, model.gather(0))
    model.build.graph.call_function(aten.add_.Tensor, (model.saved[0], 1.0))
    y = model.mm(y, model.gather(1))
    assert scheduled(model.build.output(y), latency=100) == "g0 u0 mm g1 u1 mm"


@pytest.mark.parametrize("op", [aten.zero_.default, torch.ops.inductor.resize_storage_bytes_.default])
def test_gather_of_an_input_that_the_graph_writes_is_left_alone(op: torch._ops.OpOverload) -> None:
    model = Model(2)
    y = model.mm(model.x, model.gather(0))
    weight = model.gather(1)
    model.build.graph.call_function(op, (model.shards[1],) if op is aten.zero_.default else (model.shards[1], 0))
    graph = model.build.output(model.mm(y, weight))
    report = schedule_collectives(graph, costs=taking(100))
    assert dict(report.counts) == {"collectives_scheduled": 1, "left_in_place": 1}
    assert events(graph) == "g0 u0 mm g1 u1 mm"


def test_gather_of_activations_is_left_alone(build: GraphBuilder) -> None:
    x = build.input("x", (64,))
    y = build.call(aten.relu.default, x)
    launched = build.call(c10d.all_gather_into_tensor.default, y, 2, "tp")
    graph = build.output(build.call(aten.neg.default, build.call(c10d.wait_tensor.default, launched)))
    before = render(graph)
    assert dict(schedule_collectives(graph, costs=taking(1)).counts)["left_in_place"] == 1
    assert render(graph) == before


@given(st.integers(1, 6), st.floats(0, 10), st.booleans(), st.booleans(), st.sampled_from([1, 3, 80, 8000]))
def test_order_of_collectives_does_not_depend_on_the_batch_size(
    layers: int, latency: float, is_forward: bool, hoist: bool, rows: int
) -> None:
    orders = []
    for each in (8, rows):
        graph = forward(layers, each) if is_forward else backward(layers, each)
        scheduled(graph, latency, hoist)
        orders.append([node.name for node in graph.nodes if is_collective(node)])
    assert orders[0] == orders[1]


def test_order_does_not_depend_on_the_size_of_activations_that_the_model_reduces() -> None:
    orders = []
    for rows in (2, 4096):
        model = Model(2, rows)
        weight, late = model.gather(0), model.gather(1)
        grad = model.mm(model.x, weight)
        reduced = model.reduced(model.weight_gradient(0, model.x), model.x)
        name_collectives(model.build.graph)
        hidden = model.mm(grad, model.build.input("square", (8, 8)))
        launched = model.build.call(REDUCE, hidden, "sum", 2, "tp")
        y = model.mm(model.build.call(c10d.wait_tensor.default, launched), late)
        graph = model.build.output(y, *reduced)
        scheduled(graph, 1, hoist=False)
        orders.append([node.name for node in graph.nodes if is_collective(node)])
    assert orders[0] == orders[1]


@given(st.integers(1, 6), st.floats(0, 10), st.booleans(), st.booleans())
def test_scheduling_changes_no_result(layers: int, latency: float, is_forward: bool, hoist: bool) -> None:
    graph = forward(layers) if is_forward else backward(layers)
    with same_results(graph):
        scheduled(graph, latency, hoist)


def check_results(graph: fx.Graph) -> None:
    with same_results(graph):
        schedule_collectives(graph, costs=taking(100))


def test_gather_with_two_waits_is_left_alone() -> None:
    model = Model(2)
    y = model.mm(model.x, model.gather(0))
    launched = model.build.call(c10d.all_gather_into_tensor.default, model.shards[1], 2, "dp")
    waits = [model.build.call(c10d.wait_tensor.default, launched) for _ in range(2)]
    weights = [model.build.call(aten.reshape.default, waited, [8, 8]) for waited in waits]
    graph = model.build.output(model.mm(model.mm(y, weights[0]), weights[1]))
    assert dict(schedule_collectives(graph, costs=taking(100)).counts)["left_in_place"] == 1


def test_op_that_reads_two_gathers_stays_behind_both() -> None:
    model = Model(2)
    weights = [model.gather(0), model.gather(1)]
    both = model.build.call(aten.cat.default, weights)
    y = model.mm(model.x, weights[0])
    check_results(model.build.output(y, model.build.call(aten.neg.default, both)))


def test_gathers_that_are_read_together_both_move() -> None:
    model = Model(2)
    y = model.mm(model.x, model.x)
    both = model.build.call(aten.cat.default, [model.gather(0), model.gather(1)])
    graph = model.build.output(model.mm(y, model.build.call(aten.permute.default, both, [1, 0])))
    assert scheduled(graph, latency=1) == "mm g0 g1 u0 u1 mm"


def test_cast_with_a_second_reader_is_not_moved_with_its_gather() -> None:
    model = Model(2)
    cast = model.build.call(aten._to_copy.default, model.shards[1], dtype=torch.float32)
    early = model.build.call(aten.neg.default, cast)
    y = model.mm(model.x, model.gather(0))
    (rows,) = gather(model.build, [cast], 2)
    weight = model.build.call(aten.reshape.default, rows, [8, 8])
    check_results(model.build.output(early, model.mm(y, weight)))


def test_reduction_of_a_gathered_value_keeps_its_result() -> None:
    model = Model(1)
    weight = model.gather(0)
    (shard,) = reduce(model.build, [weight], 2)
    check_results(model.build.output(shard, model.mm(model.x, weight)))


def test_small_gradients_are_in_flight_together() -> None:
    model = Model(2)
    (large,) = model.reduced(model.weight_gradient(0, model.x), model.x)[:1]
    x, small = model.x, []
    for layer in range(2):
        x = model.mm(x, model.gather(layer))
        small += reduce(model.build, [model.build.call(aten.sum.dim_IntList, x, [0])], 2)
    for saved in model.saved * 2:
        x = model.mm(x, saved)
    order = scheduled(model.build.output(large, *small, x), latency=100).split()
    assert order.index("r2") < order.index("v1")


def _fetching() -> fx.Graph:
    """A backward whose activations are in host memory; each is fetched where it is read."""
    build = GraphBuilder()
    away = [build.input(f"h{i}", (8, 8)) for i in range(3)]
    grad = build.input("grad", (8, 8))
    gradients = []
    for layer in reversed(range(3)):
        fetched = build.call(c10d.wait_tensor.default, build.call(ops.fetch, away[layer], torch.device("cpu")))
        gradients.append(build.call(aten.mm.default, fetched, grad))
        grad = build.call(aten.mm.default, grad, grad)
    return build.output(grad, *gradients)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "fetch wait mm mm fetch wait mm mm fetch wait mm mm"),
        (1.0, "fetch wait mm fetch mm wait mm fetch mm wait mm mm"),
        (1.5, "fetch fetch wait mm mm fetch wait mm mm wait mm mm"),
        (100.0, "fetch fetch fetch wait mm mm wait mm mm wait mm mm"),
    ],
)
def test_fetch_is_launched_early_enough_to_arrive_in_time(seconds: float, expected: str) -> None:
    graph = _fetching()
    costs = replace(taking(1e-9), offload_bandwidth=8 * 8 * 4 / seconds if seconds else 1e30)
    report = schedule_collectives(graph, costs=costs)
    graph.lint()
    names = {"fetch.default": "fetch", "wait_tensor.default": "wait", "mm.default": "mm"}
    assert " ".join(names[node.target.__name__] for node in graph.nodes if node.op == "call_function") == expected
    assert [node.op for node in graph.nodes][:4] == ["placeholder"] * 4
    assert dict(report.counts) == {"collectives_scheduled": 0, "left_in_place": 0}
