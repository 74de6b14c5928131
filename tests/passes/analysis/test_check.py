"""Faults of passes that `options={"verify": True}` finds; and our passes make none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.errors import VerificationError
from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import PassCounts, Pipeline, pipelines
from compile_fsdp.passes.analysis.check import checking
from compile_fsdp.passes.report import node_name
from helpers.graphs.build import GraphBuilder, aten, gather, one_window


def gathered() -> fx.Graph:
    """Two parameters of eight elements, gathered from two ranks in one pack."""
    build = GraphBuilder()
    shards = [build.input(name, (4,)) for name in ("a", "b")]
    return build.output(*(build.call(aten.add.Tensor, rows, 1.0) for rows in gather(build, shards, 2)))


def find(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if name in str(node.target))


def read_early(graph: fx.Graph) -> None:
    copy = find(graph, "fsdp.copy_")
    reader = next(user for user in copy.args[0].users if "aten" in str(user.target))
    copy.prepend(reader)


def fill_too_late(graph: fx.Graph) -> None:
    graph.erase_node(find(graph, "fsdp.copy_"))


def read_after_the_free(graph: fx.Graph) -> None:
    find(graph, "output").prepend(find(graph, "relu"))


def gather_from_more_ranks(graph: fx.Graph) -> None:
    find(graph, "all_gather").update_arg(1, 4)


def split_otherwise(graph: fx.Graph) -> None:
    find(graph, "split_with_sizes").update_arg(1, [2, 6])


def use_before_its_definition(graph: fx.Graph) -> None:
    find(graph, "all_gather").prepend(find(graph, "wait_tensor"))


@pytest.mark.parametrize(
    ("build", "change", "fault"),
    [
        (one_window, read_early, "is read while it is not filled"),
        (one_window, fill_too_late, "is read while it is not filled"),
        (one_window, read_after_the_free, "weight is read while it is freed"),
        (gathered, gather_from_more_ranks, "gives ['float32[32]'], noted is ['float32[16]']"),
        (gathered, split_otherwise, "noted is ['float32[2, 4]', 'float32[2, 4]']"),
        (gathered, use_before_its_definition, "no legal graph"),
    ],
)
def test_fault_is_found(build: Callable[[], fx.Graph], change: Callable[[fx.Graph], None], fault: str) -> None:
    graph = build()
    with pytest.raises(VerificationError) as raised, checking(graph, "careless"):
        change(graph)
    assert "expected careless to make no faults" in str(raised.value)
    assert fault in str(raised.value)


def test_faults_from_before_the_pass_are_not_reported() -> None:
    graph = one_window()
    read_early(graph)
    with checking(graph, "innocent"):
        find(graph, "fsdp.copy_").name = "renamed"


@pytest.mark.parametrize("build", [gathered, one_window])
def test_the_pipeline_checks_its_passes(build: Callable[[], fx.Graph]) -> None:
    passes = pipelines.post_grad(node_name, hoist=True, costs=None)
    Pipeline(passes, lambda reports: None, check=True)(build())


def test_the_pipeline_checks_its_passes_only_on_request() -> None:
    def careless(graph: fx.Graph) -> PassCounts:
        fill_too_late(graph)
        return PassCounts("careless", 0, 0, ())

    Pipeline([careless], lambda reports: None)(one_window())
    with pytest.raises(VerificationError, match="expected careless to make no faults"):
        Pipeline([careless], lambda reports: None, check=True)(one_window())


def test_view_used_in_a_later_window_is_found(build: GraphBuilder) -> None:
    weight, value = build.input("weight", (4, 4)), build.input("value", (4, 4))
    build.fill(weight, value)
    view = build.call(aten.t.default, weight)
    build.free(weight)
    build.fill(weight, value)
    late = build.call(aten.neg.default, weight)
    graph = build.output(late)
    with pytest.raises(VerificationError, match="a view of weight is used in another"), checking(graph, "careless"):
        late.args = (view,)


def test_windows_and_reads_of_parameters_that_arrive_filled_are_no_faults(build: GraphBuilder) -> None:
    weight, value = build.input("weight", (4, 4)), build.input("value", (4, 4))
    free = build.free(weight)
    graph = build.output(value)
    with checking(graph, "careful"):
        with graph.inserting_before(free):
            graph.call_function(aten.neg.default, (weight,))
        with graph.inserting_before(graph.output_node()):
            graph.call_function(resize_storage_bytes_, (weight, 64))
            graph.call_function(copy_, (weight, value))
            graph.call_function(aten.neg.default, (weight,))
            graph.call_function(resize_storage_bytes_, (weight, 0))


def test_ops_that_write_or_have_unknown_sizes_are_not_run_again(build: GraphBuilder) -> None:
    rows = build.size("rows")
    x, y = build.input("x", (4, 4)), build.input("y", (build.value(rows), 4))
    unknown = build.call_opaque(aten.neg.default, x)
    graph = build.output(x)

    def call(target: Callable[..., object], *args: object, noted: object) -> None:
        graph.call_function(target, args).meta["val"] = noted

    value = build.value(x)
    with checking(graph, "careful"), graph.inserting_before(graph.output_node()):
        call(aten.add_.Tensor, x, 1, noted=None)
        call(aten.full.default, [2, 2], 0, noted=torch.empty(3))
        call(aten.sym_size.int, x, 0, noted=4)
        call(aten.add.Tensor, unknown, x, noted=value)
        call(aten.neg.default, y, noted=value)
        call(aten.new_empty.default, x, [rows, 4], noted=value)
        graph.call_function(aten.neg.default, (x,))
