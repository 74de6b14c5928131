"""Rewrites of backward graphs whose reads stand outside their windows."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes.dynamo.legalize_windows import legalize_windows
from compile_fsdp.passes.report import LegalizeReport, Unmoved
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version
from helpers.graphs.build import GraphBuilder, Layer
from helpers.graphs.execution import freed, run, storage_sizes
from helpers.graphs.fuzzing import MANY, fuzz
from helpers.graphs.render import render, render_calls


def legalized(graph: fx.Graph) -> LegalizeReport:
    """Run the pass; check that the graph lints and that a second run changes nothing."""
    report = legalize_windows(graph)
    graph.lint()
    after = render(graph)
    again = legalize_windows(graph)
    assert (again.nodes_sunk, again.frees_delayed) == (0, 0)
    assert render(graph) == after
    return report


def calls(graph: fx.Graph) -> str:
    """Names of the calls in order, without arguments."""
    *lines, _ = render_calls(graph).replace("resize_storage_bytes_", "resize").splitlines()
    return " ".join(line.split(" = ")[-1].partition("(")[0] for line in lines)


def moved(graph: fx.Graph) -> tuple[int, int, str]:
    """Run the pass, which leaves nothing unmoved; return the nodes sunk, the frees delayed, and the calls in order."""
    report = legalized(graph)
    assert report.unmoved == ()
    return report.nodes_sunk, report.frees_delayed, calls(graph)


def test_recomputed_reads_sink_behind_the_fill(layer: Layer) -> None:
    build = layer.build
    transposed = build.call_method("t", layer.weight)
    hidden = build.call(torch.matmul, layer.x, transposed)
    other = build.call(torch.neg, layer.value)
    activation = build.call(torch.relu, hidden)
    layer.fill(other)
    result = build.call(operator.add, activation, layer.read())
    layer.free()
    assert moved(build.output(result)) == (3, 0, "neg resize copy_ .t matmul relu matmul add resize")


def test_free_is_delayed_behind_the_last_read(layer: Layer) -> None:
    build = layer.build
    layer.fill()
    transposed = build.call_method("t", layer.weight)
    layer.free()
    result = build.call(torch.relu, build.call(torch.matmul, layer.x, transposed))
    # The output reads no data.
    assert moved(build.output(result, transposed)) == (0, 1, "resize copy_ .t matmul resize relu")


def test_read_of_two_parameters_keeps_both_filled(layer: Layer) -> None:
    build = layer.build
    late = build.input("late", (4, 4))
    layer.fill()
    both = build.call(torch.matmul, layer.weight, late)
    layer.free()
    build.fill(late, layer.x)
    build.free(late)
    assert moved(build.output(both)) == (1, 1, "resize copy_ resize copy_ matmul resize resize")


def test_read_takes_along_the_copy_into_another_tensor_that_it_reads(layer: Layer) -> None:
    other = layer.build.input("other", (4, 4))
    product = layer.build.call(torch.matmul, layer.weight, other)
    layer.build.copy(other, layer.value)
    layer.fill()
    assert moved(layer.build.output(product)) == (2, 0, "resize copy_ matmul copy_")


def test_reads_sink_behind_the_copies_and_version_counters_of_several_fills(layer: Layer) -> None:
    build = layer.build
    late = build.input("late", (4, 4))
    early = layer.read()
    for each in (layer.weight, late):
        build.full(each)
    version = build.call(tensor_version, layer.weight)
    build.graph.call_function(torch.ops.fsdp.copy_, (layer.weight, layer.value))
    build.copy(late, layer.x)
    build.call_opaque(set_version_counter, (layer.weight, late), (version, 0))
    fills = "resize resize _tensor_version copy_ copy_ _unsafe_set_version_counter"
    assert moved(build.output(early)) == (1, 0, f"{fills} matmul")


def test_writes_keep_their_order_with_reads_that_sink(layer: Layer) -> None:
    build = layer.build
    early = layer.read()
    doubled = build.call_method("mul_", layer.x, 2)
    layer.fill()
    assert moved(build.output(early, build.call(torch.neg, doubled))) == (2, 0, "resize copy_ matmul .mul_ neg")


def test_reads_keep_their_order_with_writes_that_sink(layer: Layer) -> None:
    build = layer.build
    build.call_method("mul_", layer.x, layer.read())
    late = build.call(torch.neg, layer.x)
    layer.fill()
    assert moved(build.output(late)) == (3, 0, "resize copy_ matmul .mul_ neg")


def test_write_of_a_parameter_that_arrives_filled_keeps_its_order_with_reads_that_sink(layer: Layer) -> None:
    build = layer.build
    other = build.input("other", (4, 4))
    early = build.call(torch.matmul, layer.weight, other)
    build.call_method("add_", other, 1)
    layer.fill()
    build.free(other)
    assert moved(build.output(early)) == (2, 0, "resize copy_ matmul .add_ resize")


def test_copy_into_another_tensor_sinks_like_any_write(layer: Layer) -> None:
    build = layer.build
    buffer = build.call(torch.neg, layer.value)
    build.copy(buffer, layer.read())
    late = build.call(torch.relu, buffer)
    layer.fill()
    assert moved(build.output(late)) == (3, 0, "neg resize copy_ matmul copy_ relu")


def test_random_op_stays_where_only_other_ops_sink(layer: Layer) -> None:
    early = layer.read()
    noise = layer.build.call(torch.rand_like, layer.x)
    layer.fill()
    assert moved(layer.build.output(early, noise)) == (1, 0, "rand_like resize copy_ matmul")


def test_random_ops_keep_their_order(layer: Layer) -> None:
    build = layer.build
    early = build.call(torch.dropout, layer.read(), 0.5, True)
    other = build.call(torch.rand_like, layer.x)
    layer.fill()
    assert moved(build.output(early, other)) == (3, 0, "resize copy_ matmul dropout rand_like")


def test_fills_with_keyword_arguments_are_found(layer: Layer) -> None:
    early = layer.read()
    graph = layer.build.graph
    graph.call_function(resize_storage_bytes_, (), {"variable": layer.weight, "new_size": 64})
    graph.call_function(copy_, (), {"tensor": layer.weight, "data": layer.value})
    assert legalized(layer.build.output(early)).nodes_sunk == 1


def test_attribute_named_autocast_is_no_switch(layer: Layer) -> None:
    early = layer.read()
    layer.build.subgraph("autocast_region", GraphBuilder().output_module())
    layer.fill()
    assert legalized(layer.build.output(early)).nodes_sunk == 1


def refused(layer: Layer, *results: fx.Node) -> tuple[tuple[str, Unmoved], ...]:
    graph = layer.build.output(*results)
    before = list(graph.nodes)
    report = legalized(graph)
    assert list(graph.nodes) == before
    assert (report.nodes_sunk, report.frees_delayed) == (0, 0)
    return report.unmoved


def test_read_is_not_moved_over_an_autocast_switch(layer: Layer) -> None:
    build = layer.build
    autocast = torch.amp.autocast_mode
    entered = build.call_opaque(autocast._enter_autocast, "cpu", torch.bfloat16, True, None)
    early = layer.read()
    build.call_opaque(autocast._exit_autocast, entered)
    layer.fill()
    assert refused(layer, early) == (("weight", Unmoved.AUTOCAST),)


def test_read_that_feeds_the_fill_is_not_moved(layer: Layer) -> None:
    early = layer.read()
    layer.fill(layer.build.call(torch.neg, early))
    assert refused(layer, early) == (("weight", Unmoved.FILL_DEPENDS_ON_READ),)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        pytest.param("read full", Unmoved.NO_COPY, id="never filled"),
        pytest.param("read full free fill", Unmoved.NO_COPY, id="freed before it is filled"),
        pytest.param("read fill write", Unmoved.MUTATED, id="mutated, read before the fill"),
        pytest.param("fill write free read", Unmoved.MUTATED, id="mutated, read after the free"),
        pytest.param("fill write read free", None, id="mutated, with legal reads"),
        pytest.param("read free fill", None, id="arrives filled"),
        pytest.param("read copy free", None, id="arrives filled, and is copied into"),
        pytest.param("fill full read free", None, id="resized to full twice"),
    ],
)
def test_read_that_is_legal_or_cannot_be_moved_stays(layer: Layer, steps: str, reason: Unmoved | None) -> None:
    assert refused(layer, *layer.add(steps)) == ((("weight", reason),) if reason else ())


def test_version_counters_are_no_reads(layer: Layer) -> None:
    reads = layer.add("fill read free")
    version = layer.build.call(tensor_version, layer.weight)
    layer.build.call_opaque(set_version_counter, (layer.weight,), (version,))
    assert refused(layer, *reads) == ()


def test_report_is_one_line() -> None:
    report = LegalizeReport(3, 1, (("layers.0.wq", Unmoved.AUTOCAST),))
    counts, kept = str(report).split("; ")
    assert counts == "legalize_windows: nodes sunk 3, frees delayed 1"
    assert kept == "kept 1 (read would cross an autocast switch: layers.0.wq)"


@st.composite
def backward_orders(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Windows on two parameters, with reads and other ops put anywhere."""
    order: list[tuple[str, int]] = [("fill", 0), ("free", 0), ("fill", 1), ("free", 1)]
    if draw(st.booleans()):
        order += [("fill", 0), ("free", 0)]
    for _ in range(draw(st.integers(1, 6))):
        read = (draw(st.sampled_from(["read", "view", "both", "mutate_x", "use"])), draw(st.integers(0, 1)))
        order.insert(draw(st.integers(0, len(order))), read)
    return order


def build_backward(order: list[tuple[str, int]]) -> fx.Graph:
    build = GraphBuilder(meta_key="example_value")
    parameters = [build.input(f"p{i}", (2, 2)) for i in range(2)]
    values = [build.input(f"v{i}", (2, 2)) for i in range(2)]
    x = build.input("x", (2, 2))
    results = [build.call(torch.neg, x)]
    views = [[build.call_method("t", parameter)] for parameter in parameters]
    for what, i in order:
        if what == "fill":
            build.fill(parameters[i], values[i])
        elif what == "free":
            build.free(parameters[i])
        elif what == "view":
            views[i].append(build.call_method("t", views[i][-1]))
        elif what == "mutate_x":
            build.call_method("add_", x, 1)
        elif what == "use":
            results.append(build.call(operator.mul, results[-1], results[i % len(results)]))
        else:
            other = x if what == "read" else views[1 - i][-1]
            results.append(build.call(torch.add, views[i][-1], other))
    return build.output(*results)


def without_events(graph: fx.Graph) -> fx.Graph:
    """A copy without fills and frees: the reference if each parameter has only one value."""
    reference = fx.Graph()
    reference.output(reference.graph_copy(graph, {}))
    for node in list(reference.nodes):
        if node.target in (copy_, resize_storage_bytes_):
            reference.erase_node(node)
    module = fx.GraphModule(torch.nn.Module(), reference)
    return module.graph


def check_order(order: list[tuple[str, int]]) -> None:
    graph = build_backward(order)
    values = {"v0": torch.arange(4.0).view(2, 2), "v1": torch.full((2, 2), 3.0)}

    def inputs(p0: torch.Tensor, p1: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"p0": p0, "p1": p1, **values, "x": torch.eye(2)}

    expected = run(without_events(graph), inputs(values["v0"].clone(), values["v1"].clone()))
    report = legalized(graph)
    assert report.unmoved == ()
    given_inputs = inputs(freed(2, 2), freed(2, 2))
    torch.testing.assert_close(run(graph, given_inputs), expected, rtol=0, atol=0)
    sizes = storage_sizes(given_inputs)
    assert (sizes["p0"], sizes["p1"]) == (0, 0)


@MANY
def test_legalized_graph_computes_reference_results(examples: int) -> None:
    fuzz(check_order, examples, backward_orders())


def test_only_inputs_are_parameters(layer: Layer) -> None:
    build = layer.build
    buffer = build.call(torch.neg, layer.value)
    item = build.call(operator.getitem, build.call(torch.split, layer.value, 2), 0)
    early = build.call(torch.matmul, layer.x, buffer)
    for each in (buffer, item):
        build.full(each)
        build.free(each)
    build.copy(buffer, layer.value)
    assert refused(layer, early, build.call(torch.neg, item)) == ()


@pytest.mark.parametrize("is_early", [True, False])
def test_item_of_an_input_is_a_parameter(is_early: bool) -> None:
    build = GraphBuilder(meta_key="example_value")
    with build.fake_mode:
        inputs = build.input_like("inputs", [torch.empty(4, 4), torch.empty(4, 4)])
    weight, value = (build.call(operator.getitem, inputs, i) for i in range(2))
    early = build.call(torch.neg, weight) if is_early else value
    build.fill(weight, value)
    late = build.call(torch.neg, weight)
    build.free(weight)
    # Another item, taken after the free, is no read of the parameter.
    sunk, delayed, _ = moved(build.output(early, late, build.call(operator.getitem, inputs, 1)))
    assert (sunk, delayed) == (int(is_early), 0)


def test_copy_into_an_intermediate_is_no_fill(layer: Layer) -> None:
    build = layer.build
    other = build.call(torch.neg, layer.value)
    build.copy(other, layer.value)
    layer.fill()
    early = build.call(torch.neg, other)
    layer.free()
    assert refused(layer, early) == ()
