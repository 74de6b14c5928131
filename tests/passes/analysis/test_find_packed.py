"""Packed collectives, and graphs that only resemble them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from torch import fx

from compile_fsdp.ops import split_with_sizes_copy
from compile_fsdp.passes.analysis.collectives import WAIT, find_packed, is_gather, is_rearrangement, is_reduction
from helpers.graphs.build import GATHER, REDUCE, GraphBuilder, aten, c10d, gather, reduce


def found_after(change: Callable[[fx.Graph, dict[str, fx.Node]], object]) -> int:
    """Number of packed gathers in a graph with one pack, after a change."""
    build = GraphBuilder()
    build.output(*gather(build, [build.input("a", (2,)), build.input("b", (3,))], 2))
    targets = {"pack": aten.cat.default, "wait": WAIT, "split": split_with_sizes_copy, "launch": GATHER}
    nodes = {
        name: next(node for node in build.graph.nodes if node.target is target) for name, target in targets.items()
    }
    with build.graph.inserting_before(build.graph.output_node()):
        change(build.graph, nodes)
    return len(find_packed(build.graph, is_gather))


def read(name: str) -> Callable[[fx.Graph, dict[str, fx.Node]], object]:
    return lambda graph, nodes: graph.call_function(aten.neg.default, (nodes[name],))


def do_not_wait(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["wait"].replace_all_uses_with(nodes["launch"])
    graph.erase_node(nodes["wait"])


def split_what_was_launched(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["split"].args = (nodes["launch"], *nodes["split"].args[1:])
    for node in (nodes["wait"].next, nodes["wait"]):
        graph.erase_node(node)


def test_pack_of_the_runtime_is_found() -> None:
    assert found_after(lambda graph, nodes: None) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda graph, nodes: nodes["split"].update_arg(1, [3, 2]),
        lambda graph, nodes: nodes["split"].update_arg(1, [2, 2, 1]),
        *map(read, ("pack", "launch", "wait", "split")),
        lambda graph, nodes: graph.call_function(operator.getitem, (nodes["split"], 0)),
        *(do_not_wait, split_what_was_launched),
        lambda graph, nodes: setattr(nodes["split"], "target", aten.split.Tensor),
    ],
    ids=[
        *("other sizes", "more sizes", "pack read", "launch read", "wait read", "split read", "item taken again"),
        *("no wait", "launch split", "another split"),
    ],
)
def test_graph_that_resembles_a_pack_is_left_alone(change: Callable[[fx.Graph, dict[str, fx.Node]], object]) -> None:
    assert found_after(change) == 0


def test_split_of_a_single_gathered_tensor_is_left_alone(build: GraphBuilder) -> None:
    whole = build.call(aten.neg.default, build.input("a", (5,)))
    launched = build.call(c10d.all_gather_into_tensor.default, whole, 2, "dp")
    rows = build.call(aten.reshape.default, build.call(WAIT, launched), [2, 5])
    split = build.call(split_with_sizes_copy, rows, [2, 3], 1)
    for i in range(2):
        build.call(operator.getitem, split, i)
    assert find_packed(build.graph, is_gather) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [("none", 1), ("read before it is sent", 0), ("scaled by a constant", 1), ("scaled by an input", 0)],
)
def test_pack_of_gradients_is_sent_unread_and_scaled_by_constants_only(change: str, found: int) -> None:
    build = GraphBuilder()
    gradients = [build.input("a", (2, 2)), build.input("b", (2, 3))]
    graph = build.output(*reduce(build, gradients, 2))
    (launched,) = graph.find_nodes(op="call_function", target=REDUCE)
    (waited,) = launched.users
    with graph.inserting_after(waited):
        if change == "read before it is sent":
            graph.call_function(aten.neg.default, (launched.args[0],))
        elif change != "none":
            scaled = graph.call_function(aten.mul.Tensor, (waited, 2.0))
            waited.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
            if change == "scaled by an input":
                scaled.args = (waited, gradients[0])
    assert len(find_packed(graph, is_reduction)) == found


def test_cast_is_a_rearrangement_and_a_product_is_none(build: GraphBuilder) -> None:
    x = build.input("x", (2, 2))
    assert is_rearrangement(build.call(aten._to_copy.default, x, dtype=None))
    assert is_rearrangement(build.call(aten.t.default, x))
    assert not is_rearrangement(build.call(aten.mm.default, x, x))
    assert not is_rearrangement(build.call(aten.add_.Tensor, x, 1))
