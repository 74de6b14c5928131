"""Graphs before and after the removal of their windows."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes import Kept, WindowReport
from compile_fsdp.passes.analysis.layout import needed_bytes
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.torch_compat.inductor import MUTATION_REGION_KEY
from helpers.graphs.build import GraphBuilder, Layer, aten, one_window, subgraph_with_window
from helpers.graphs.render import render, render_calls


def removed(graph: fx.Graph) -> WindowReport:
    """Run the pass; check that the graph lints and that a second run changes nothing."""
    report = remove_unshard_copies(graph)
    graph.lint()
    after = render(graph)
    assert remove_unshard_copies(graph).windows_removed == 0
    assert render(graph) == after
    return report


def test_window_becomes_a_direct_read() -> None:
    graph = one_window(torch.bfloat16)
    assert_expected_inline(render_calls(graph), """\
%0: bf16[8] = all_gather_into_tensor(shard, 2, 'dp')
%1: bf16[8] = wait_tensor(%0)
resize_storage_bytes_(weight, 16)
copy_(weight, %1)
%2: bf16[8] = relu(weight)
resize_storage_bytes_(weight, 0)
return (%2,)
""")
    report = removed(graph)
    assert (report.windows_removed, report.copies_removed, report.resizes_removed) == (1, 1, 2)
    assert (report.bytes_removed, report.kept) == (16, ())
    assert (report.nodes_before, report.nodes_after) == (9, 6)
    assert_expected_inline(render_calls(graph), """\
%0: bf16[8] = all_gather_into_tensor(shard, 2, 'dp')
%1: bf16[8] = wait_tensor(%0)
%2: bf16[8] = relu(%1)
return (%2,)
""")


def test_lone_free_at_the_start_stays(layer: Layer) -> None:
    graph = layer.build.output(*layer.add("read free fill read free"))
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.OPEN_AT_START),))
    assert_expected_inline(render_calls(graph), """\
%0: f32[4, 4] = mm(x, weight)
resize_storage_bytes_(weight, 0)
%1: f32[4, 4] = mm(x, value)
return (%0, %1)
""")


def test_lone_fill_at_the_return_stays(layer: Layer) -> None:
    graph = layer.build.output(*layer.add("fill read free fill read"), layer.weight)
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.OPEN_AT_RETURN),))
    assert_expected_inline(render_calls(graph), """\
%0: f32[4, 4] = mm(x, value)
resize_storage_bytes_(weight, 64)
copy_(weight, value)
%1: f32[4, 4] = mm(x, weight)
return (%0, %1, weight)
""")


def test_every_kind_of_argument_is_replaced(layer: Layer) -> None:
    build = layer.build
    layer.fill()
    stacked = build.call(aten.cat.default, [layer.weight, layer.x, layer.weight])
    product = build.call(aten.mul.Tensor, layer.x, other=layer.weight)
    layer.free()
    graph = build.output(stacked, product)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render_calls(graph), """\
%0: f32[12, 4] = cat([value, x, value])
%1: f32[4, 4] = mul(x, other=value)
return (%0, %1)
""")


def test_views_become_views_of_the_value(layer: Layer) -> None:
    build = layer.build
    layer.fill()
    halves = build.call(aten.split.Tensor, build.call(aten.t.default, layer.weight), 2, 1)
    result = build.call(aten.mm.default, layer.x, build.call(operator.getitem, halves, 1))
    layer.free()
    graph = build.output(result)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render_calls(graph), """\
%0: f32[4, 4] = t(value)
%1 = split(%0, 2, 1)
%2: f32[4, 2] = getitem(%1, 1)
%3: f32[4, 2] = mm(x, %2)
return (%3,)
""")


def test_padded_storage_is_full(build: GraphBuilder) -> None:
    with build.fake_mode:
        padded = torch.empty(16).as_strided((3, 4), (4, 1))  # dim 0 in two chunks of two rows
    weight = build.input_like("weight", padded)
    value = build.input("value", (3, 4))
    build.fill(weight, value)
    result = build.call(aten.relu.default, weight)
    build.free(weight)
    graph = build.output(result)
    assert (removed(graph).bytes_removed, needed_bytes(padded)) == (64, 48)
    assert_expected_inline(render_calls(graph), """\
%0: f32[3, 4] = relu(value)
return (%0,)
""")


def test_symbolic_full_size_needs_no_guard(build: GraphBuilder) -> None:
    rows_node = build.size("rows")
    rows, shape_env = build.value(rows_node), build.fake_mode.shape_env
    weight = build.input("weight", (rows, 4))
    value = build.input("value", (rows, 4))
    size_bytes = build.call(operator.mul, rows_node, 16)
    build.resize(weight, size_bytes)
    build.copy(weight, value)
    result = build.call(aten.relu.default, weight)
    build.free(weight)
    graph = build.output(result)
    assert shape_env is not None
    guards = len(shape_env.guards)
    report = removed(graph)
    assert (report.windows_removed, report.bytes_removed) == (1, 0)
    assert len(shape_env.guards) == guards
    assert_expected_inline(render_calls(graph).replace(str(rows), "s"), """\
%0: 16*s = mul(rows, 16)
%1: f32[s, 4] = relu(value)
return (%1,)
""")


def checkpointed(region: fx.Node, layer: Layer) -> fx.Node:
    build = layer.build
    op = torch.ops.higher_order.wrap_activation_checkpoint
    with build.fake_mode:
        value = (torch.empty(4, 4),)
    call = build.call_opaque(op, region, layer.x, layer.weight, value=value)
    return build.call(operator.getitem, call, 0)


def test_operand_of_a_checkpoint_is_replaced(layer: Layer) -> None:
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    layer.fill()
    region = layer.build.subgraph("region", body.output_module(body.call(aten.mm.default, x, w)))
    result = checkpointed(region, layer)
    layer.free()
    graph = layer.build.output(result)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render_calls(graph), """\
%0 = wrap_activation_checkpoint(region, x, value)
%1: f32[4, 4] = getitem(%0, 0)
return (%1,)
region:
  %0: f32[4, 4] = mm(x, w)
  return (%0,)
""")


def test_window_inside_a_subgraph_is_removed(layer: Layer) -> None:
    graph = layer.build.output(checkpointed(subgraph_with_window(layer.build), layer))
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, ())
    assert_expected_inline(render_calls(graph), """\
%0 = wrap_activation_checkpoint(region, x, weight)
%1: f32[4, 4] = getitem(%0, 0)
return (%1,)
region:
  %0: f32[4, 4] = neg(x)
  %1: f32[4, 4] = mm(x, %0)
  return (%1,)
""")
    assert graph.owning_module is not None
    weight = torch.zeros(4, 4)
    (result,) = graph.owning_module.region(torch.eye(4), weight)
    assert torch.equal(result, -torch.eye(4))
    size_bytes = weight.untyped_storage().nbytes()  # A tensor without memory cannot be shown in a failed assertion.
    assert size_bytes == 64


def test_view_that_takes_a_second_parameter_aliases_only_the_first(layer: Layer) -> None:
    other = layer.build.input("other", (4, 4))
    layer.fill()
    layer.build.fill(other, layer.x)
    view = layer.build.call(aten.expand_as.default, layer.weight, other)
    result = layer.build.call(aten.neg.default, view)
    layer.free()
    layer.build.free(other)
    assert removed(layer.build.output(result)).windows_removed == 2


def test_metadata_and_stack_traces_stay(layer: Layer) -> None:
    graph = layer.build.output(*layer.add("fill read free"))
    for node in graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
    before = {node.name: dict(node.meta) for node in graph.nodes}
    removed(graph)
    assert len(graph.nodes) == 5
    for node in graph.nodes:
        assert node.meta == before[node.name]


def test_stale_mutation_regions_are_erased() -> None:
    graph = one_window()
    for region, node in enumerate(graph.nodes):
        node.meta[MUTATION_REGION_KEY] = region
    removed(graph)
    assert not any(MUTATION_REGION_KEY in node.meta for node in graph.nodes)


def test_graph_without_windows_comes_back_untouched(build: GraphBuilder) -> None:
    x = build.input("x", (4, 4))
    unused = build.call(aten.neg.default, x)
    graph = build.output(build.call(aten.relu.default, x))
    unused.meta[MUTATION_REGION_KEY] = 0
    before = [(node, node.args, dict(node.meta)) for node in graph.nodes]
    assert removed(graph).nodes_after == 4
    assert [(node, node.args, dict(node.meta)) for node in graph.nodes] == before
