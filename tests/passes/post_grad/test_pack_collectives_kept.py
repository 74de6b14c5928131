"""Packs that stay as they are, and readers that keep their values."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.collectives import CAST
from compile_fsdp.passes.post_grad.pack_gathers import pack_gathers
from compile_fsdp.passes.post_grad.pack_reductions import pack_reductions
from helpers.graphs.build import GATHER, REDUCE, GraphBuilder, aten, c10d, gather, reduce
from helpers.graphs.lockstep import same_results

# ALONE: a collective per parameter is cheapest. TOGETHER: one pack for all parameters is cheapest.
ALONE = Costs(latency=0.0, comm_bandwidth=1.0, memory_bandwidth=1.0, flops=1.0)
TOGETHER = Costs(latency=1e9, comm_bandwidth=1.0, memory_bandwidth=1.0, flops=1.0)


def launched(graph: fx.Graph, target: torch._ops.OpOverload) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def strided_input(build: GraphBuilder, name: str, shape: tuple[int, ...]) -> fx.Node:
    """An input that is not contiguous."""
    with build.fake_mode:
        return build.input_like(name, torch.empty(*shape, 2)[..., 0])


def test_shards_with_gaps_stay_packed(build: GraphBuilder) -> None:
    shards = [strided_input(build, "a", (2,)), build.input("b", (3,))]
    graph = build.output(*gather(build, shards, 2))
    with same_results(graph):
        assert dict(pack_gathers(graph, costs=ALONE).counts)["gathered_alone"] == 0
    assert launched(graph, GATHER) == 1


def test_gradients_with_gaps_stay_packed(build: GraphBuilder) -> None:
    gradients = [strided_input(build, "a", (2, 2)), build.input("b", (2, 3))]
    packed = build.call(aten.reshape.default, build.call(aten.cat.default, gradients, 1), [-1])
    waited = build.call(c10d.wait_tensor.default, build.call(REDUCE, packed, "avg", 2, "dp"))
    split = build.call(ops.split_with_sizes_copy, waited, [2, 3], 0)
    graph = build.output(*(build.call(operator.getitem, split, i) for i in range(2)))
    with same_results(graph):
        assert dict(pack_reductions(graph, costs=ALONE).counts)["reduced_alone"] == 0
    assert launched(graph, REDUCE) == 1


def test_cast_that_has_another_reader_or_comes_before_a_write_stays() -> None:
    for is_written in (False, True):
        build = GraphBuilder()
        shards = [build.input(name, (2,)) for name in ("a", "b")]
        casts = [build.call(CAST, each, torch.bfloat16) for each in shards]
        if is_written:
            build.call(aten.add_.Tensor, shards[0], 1)
        graph = build.output(*gather(build, casts, 2), *(casts if not is_written else []))
        with same_results(graph):
            pack_gathers(graph, costs=TOGETHER)
        assert set(casts) <= set(graph.nodes)


def test_cast_that_two_packs_share_is_erased_once(build: GraphBuilder) -> None:
    shards = [build.input(name, (2,)) for name in ("a", "b", "c")]
    casts = [build.call(CAST, each, torch.bfloat16) for each in shards]
    graph = build.output(*gather(build, casts[:2], 2), *gather(build, casts[1:], 2))
    with same_results(graph):
        pack_gathers(graph, costs=TOGETHER)
    assert not set(casts) & set(graph.nodes)


def test_costs_of_the_device_are_used_unless_given(build: GraphBuilder) -> None:
    shards = [build.input(name, (2,)) for name in "ab"]
    gradients = [build.input(name, (2, 2)) for name in "cd"]
    graph = build.output(*gather(build, shards, 2), *reduce(build, gradients, 2))
    pack_gathers(graph)
    pack_reductions(graph)
    assert (launched(graph, GATHER), launched(graph, REDUCE)) == (1, 1)


def test_unread_gradient_is_packed(build: GraphBuilder) -> None:
    pairs = [[build.input(f"g{i}{j}", (2, 2)) for j in range(2)] for i in range(2)]
    first, second = (reduce(build, pair, 2) for pair in pairs)
    build.graph.erase_node(first[0])
    graph = build.output(first[1], *second)
    with same_results(graph):
        pack_reductions(graph, merge=True, costs=TOGETHER)
    assert launched(graph, REDUCE) == 1


def test_items_are_written_independently(build: GraphBuilder) -> None:
    read, written = gather(build, [build.input(name, (2,)) for name in ("a", "b")], 2)
    build.call(aten.add_.Tensor, written, 1)
    graph = build.output(build.call(aten.neg.default, read), written)
    with same_results(graph):
        pack_gathers(graph, costs=ALONE)
    assert launched(graph, GATHER) == 2


class Groups:
    """Groups of two parameters, gathered one after the other into parameters that stay unsharded."""

    def __init__(self, count: int = 2) -> None:
        self.build = GraphBuilder()
        self.shards = [[self.build.input(f"s{i}{j}", (2,)) for j in range(2)] for i in range(count)]
        self.weights = [[self.build.input(f"w{i}{j}", (2, 2)) for j in range(2)] for i in range(count)]

    def fill(self, group: int, shards: Sequence[fx.Node] | None = None) -> list[fx.Node]:
        values = gather(self.build, shards or self.shards[group], 2)
        for weight, value in zip(self.weights[group], values, strict=True):
            self.build.fill(weight, value)
        return values

    def gathers(self) -> int:
        """Number of gathers after packing."""
        graph = self.build.output(self.build.call(aten.neg.default, self.weights[1][1]))
        inputs = [node.name for node in graph.find_nodes(op="placeholder")]
        pack_gathers(graph, merge=True, costs=TOGETHER)
        graph.lint()
        assert [node.name for node in graph.find_nodes(op="placeholder")] == inputs
        return launched(graph, GATHER)


def test_three_groups_that_stay_unsharded_are_gathered_together() -> None:
    groups = Groups(3)
    for group in range(3):
        groups.fill(group)
    assert groups.gathers() == 1


@pytest.mark.parametrize("case", ["first freed", "second freed", "value read directly", "values computed by the graph"])
def test_group_is_gathered_by_itself(case: str) -> None:
    groups = Groups()
    call = groups.build.call
    groups.fill(0)
    if case == "values computed by the graph":
        groups.fill(1, [call(aten.neg.default, call(aten.relu.default, each)) for each in groups.shards[1]])
    else:
        values = groups.fill(1)
        if case == "value read directly":
            call(aten.neg.default, values[0])
        else:
            groups.build.free(groups.weights[case == "second freed"][0])
    assert groups.gathers() == 2
