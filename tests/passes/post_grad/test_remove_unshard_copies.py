"""Graphs before and after the removal of their windows."""

from __future__ import annotations

import copy
import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import Kept, WindowReport
from compile_fsdp.passes.analysis.layout import needed_bytes
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.torch_compat.inductor import MUTATION_REGION_KEY
from helpers.graphs.build import GraphBuilder, Layer, aten, one_window
from helpers.graphs.execution import freed, run, storage_sizes
from helpers.graphs.render import render


def removed(graph: fx.Graph) -> WindowReport:
    """Run the pass; check that the graph lints and that a second run changes nothing."""
    report = remove_unshard_copies(graph)
    graph.lint()
    after = render(graph)
    assert remove_unshard_copies(graph).windows_removed == 0
    assert render(graph) == after
    return report


def test_window_becomes_a_direct_read() -> None:
    graph = one_window(numel=8, dtype=torch.bfloat16)
    assert_expected_inline(render(graph), """\
weight: bf16[8]
shard: bf16[4]
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
    assert_expected_inline(render(graph), """\
weight: bf16[8]
shard: bf16[4]
%0: bf16[8] = all_gather_into_tensor(shard, 2, 'dp')
%1: bf16[8] = wait_tensor(%0)
%2: bf16[8] = relu(%1)
return (%2,)
""")


def test_each_window_has_its_own_value() -> None:
    layer = Layer()
    build = layer.build
    layer.fill()
    first = layer.read()
    layer.free()
    again = build.call(aten.neg.default, layer.value)
    layer.fill(again)
    second = layer.read()
    layer.free()
    graph = build.output(first, second)
    assert removed(graph).windows_removed == 2
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[4, 4] = mm(x, value)
%1: f32[4, 4] = neg(value)
%2: f32[4, 4] = mm(x, %1)
return (%0, %2)
""")


def test_lone_free_at_the_start_stays() -> None:
    layer = Layer()
    build = layer.build
    kept_from_forward = layer.read()
    layer.free()
    layer.fill()
    refilled = layer.read()
    layer.free()
    graph = build.output(kept_from_forward, refilled)
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.OPEN_AT_START),))
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[4, 4] = mm(x, weight)
resize_storage_bytes_(weight, 0)
%1: f32[4, 4] = mm(x, value)
return (%0, %1)
""")


def test_lone_fill_at_the_return_stays() -> None:
    layer = Layer()
    layer.fill()
    first = layer.read()
    layer.free()
    layer.fill()
    second = layer.read()
    graph = layer.build.output(first, second, layer.weight)
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.OPEN_AT_RETURN),))
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[4, 4] = mm(x, value)
resize_storage_bytes_(weight, 64)
copy_(weight, value)
%1: f32[4, 4] = mm(x, weight)
return (%0, %1, weight)
""")


def test_parameter_in_the_output_is_no_read() -> None:
    layer = Layer()
    layer.fill()
    result = layer.read()
    layer.free()
    graph = layer.build.output(result, layer.weight)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[4, 4] = mm(x, value)
return (%0, weight)
""")


def test_every_kind_of_argument_is_replaced() -> None:
    layer = Layer()
    build = layer.build
    layer.fill()
    stacked = build.call(aten.cat.default, [layer.weight, layer.x, layer.weight])
    product = build.call(aten.mul.Tensor, layer.x, other=layer.weight)
    layer.free()
    graph = build.output(stacked, product)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[12, 4] = cat([value, x, value])
%1: f32[4, 4] = mul(x, other=value)
return (%0, %1)
""")


def test_views_become_views_of_the_value() -> None:
    layer = Layer()
    build = layer.build
    layer.fill()
    halves = build.call(aten.split.Tensor, build.call(aten.t.default, layer.weight), 2, 1)
    result = build.call(aten.mm.default, layer.x, build.call(operator.getitem, halves, 1))
    layer.free()
    graph = build.output(result)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0: f32[4, 4] = t(value)
%1 = split(%0, 2, 1)
%2: f32[4, 2] = getitem(%1, 1)
%3: f32[4, 2] = mm(x, %2)
return (%3,)
""")


def test_window_without_reads_is_removed() -> None:
    layer = Layer()
    layer.fill()
    layer.free()
    graph = layer.build.output(layer.x)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
return (x,)
""")


def test_padded_storage_is_full() -> None:
    build = GraphBuilder()
    with build.fake_mode:
        padded = torch.empty(16).as_strided((3, 4), (4, 1))  # dim 0 in two chunks of two rows
    weight = build.input_like("weight", padded)
    value = build.input("value", (3, 4))
    build.fill(weight, value)
    result = build.call(aten.relu.default, weight)
    build.free(weight)
    graph = build.output(result)
    assert (removed(graph).bytes_removed, needed_bytes(padded)) == (64, 48)
    assert_expected_inline(render(graph), """\
weight: f32[3, 4]
value: f32[3, 4]
%0: f32[3, 4] = relu(value)
return (%0,)
""")


def test_symbolic_full_size_needs_no_guard() -> None:
    build = GraphBuilder()
    shape_env = build.fake_mode.shape_env
    assert shape_env is not None
    rows = shape_env.create_unbacked_symint()
    rows_node = build.input_like("rows", rows)
    weight = build.input("weight", (rows, 4))
    value = build.input("value", (rows, 4))
    size_bytes = build.call(operator.mul, rows_node, 16)
    build.resize(weight, size_bytes)
    build.copy(weight, value)
    result = build.call(aten.relu.default, weight)
    build.free(weight)
    graph = build.output(result)
    guards = len(shape_env.guards)
    report = removed(graph)
    assert (report.windows_removed, report.bytes_removed) == (1, 0)
    assert len(shape_env.guards) == guards
    assert_expected_inline(render(graph).replace(str(rows), "s"), """\
rows: s
weight: f32[s, 4]
value: f32[s, 4]
%0: 16*s = mul(rows, 16)
%1: f32[s, 4] = relu(value)
return (%1,)
""")


def checkpointed(body: fx.GraphModule, layer: Layer) -> fx.Node:
    build = layer.build
    region = build.subgraph("region", body)
    op = torch.ops.higher_order.wrap_activation_checkpoint
    with build.fake_mode:
        value = (torch.empty(4, 4),)
    call = build.call_opaque(op, region, layer.x, layer.weight, value=value)
    return build.call(operator.getitem, call, 0)


def test_operand_of_a_checkpoint_is_replaced() -> None:
    layer = Layer()
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    layer.fill()
    result = checkpointed(body.output_module(body.call(aten.mm.default, x, w)), layer)
    layer.free()
    graph = layer.build.output(result)
    assert removed(graph).windows_removed == 1
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0 = wrap_activation_checkpoint(region, x, value)
%1: f32[4, 4] = getitem(%0, 0)
return (%1,)
region:
  x: f32[4, 4]
  w: f32[4, 4]
  %0: f32[4, 4] = mm(x, w)
  return (%0,)
""")


def test_window_inside_a_subgraph_is_removed() -> None:
    layer = Layer()
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    body.fill(w, body.call(aten.neg.default, x))
    inside = body.call(aten.mm.default, x, w)
    body.free(w)
    graph = layer.build.output(checkpointed(body.output_module(inside), layer))
    report = removed(graph)
    assert (report.windows_removed, report.kept) == (1, ())
    assert_expected_inline(render(graph), """\
weight: f32[4, 4]
value: f32[4, 4]
x: f32[4, 4]
%0 = wrap_activation_checkpoint(region, x, weight)
%1: f32[4, 4] = getitem(%0, 0)
return (%1,)
region:
  x: f32[4, 4]
  w: f32[4, 4]
  %0: f32[4, 4] = neg(x)
  %1: f32[4, 4] = mm(x, %0)
  return (%1,)
""")


def test_module_of_a_subgraph_runs_without_its_window() -> None:
    layer = Layer()
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    body.fill(w, body.call(aten.neg.default, x))
    inside = body.call(aten.mm.default, x, w)
    body.free(w)
    module = body.output_module(inside)
    removed(layer.build.output(checkpointed(module, layer)))
    weight = torch.zeros(4, 4)
    (result,) = module(torch.eye(4), weight)
    assert torch.equal(result, -torch.eye(4))
    size_bytes = weight.untyped_storage().nbytes()  # A tensor without memory cannot be shown in a failed assertion.
    assert size_bytes == 64


def test_view_that_takes_a_second_parameter_aliases_only_the_first() -> None:
    layer = Layer()
    other = layer.build.input("other", (4, 4))
    layer.fill()
    layer.build.fill(other, layer.x)
    view = layer.build.call(aten.expand_as.default, layer.weight, other)
    result = layer.build.call(aten.neg.default, view)
    layer.free()
    layer.build.free(other)
    assert removed(layer.build.output(result)).windows_removed == 2


def test_metadata_and_stack_traces_stay() -> None:
    layer = Layer()
    layer.fill()
    result = layer.read()
    layer.free()
    graph = layer.build.output(result)
    for node in graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
    before = {node.name: dict(node.meta) for node in graph.nodes}
    removed(graph)
    assert len(graph.nodes) == 5
    for node in graph.nodes:
        assert node.meta == before[node.name]


def test_stale_mutation_regions_are_erased() -> None:
    graph = one_window(numel=8, dtype=torch.float32)
    for region, node in enumerate(graph.nodes):
        node.meta[MUTATION_REGION_KEY] = region
    removed(graph)
    assert not any(MUTATION_REGION_KEY in node.meta for node in graph.nodes)


def test_graph_without_windows_comes_back_untouched() -> None:
    build = GraphBuilder()
    x = build.input("x", (4, 4))
    unused = build.call(aten.neg.default, x)
    graph = build.output(build.call(aten.relu.default, x))
    unused.meta[MUTATION_REGION_KEY] = 0
    before = [(node, node.args, dict(node.meta)) for node in graph.nodes]
    assert removed(graph).nodes_after == 4
    assert [(node, node.args, dict(node.meta)) for node in graph.nodes] == before


def test_result_is_deterministic() -> None:
    def rendered() -> tuple[str, tuple[tuple[str, Kept], ...]]:
        layer = Layer()
        other = layer.build.input("other", (4, 4))
        layer.build.fill(other, layer.x)
        layer.fill()
        results = [layer.read(), layer.build.call(aten.mm.default, layer.weight, other)]
        layer.free()
        kept = removed(graph := layer.build.output(*results)).kept
        return render(graph), kept

    assert rendered() == rendered()


def test_results_and_storage_sizes_do_not_change() -> None:
    graphs = [two_parameters() for _ in range(2)]
    removed(graphs[1])
    assert not any(node.target in (copy_, resize_storage_bytes_) for node in graphs[1].nodes)
    given = {"x": torch.randn(4, 4), "value": torch.randn(4, 4)}
    outcomes = []
    for graph in graphs:
        inputs = copy.deepcopy(given) | {"weight": freed(4, 4), "bias": freed(4, 4)}
        outcomes.append((run(graph, inputs), storage_sizes(inputs)))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=0, atol=0)
    assert outcomes[0][1] == outcomes[1][1]


def two_parameters() -> fx.Graph:
    layer = Layer()
    build = layer.build
    bias = build.input("bias", (4, 4))
    layer.fill()
    build.fill(bias, build.call(aten.neg.default, layer.value))
    hidden = build.call(aten.addmm.default, bias, layer.x, build.call(aten.t.default, layer.weight))
    layer.free()
    build.free(bias)
    layer.fill(hidden)
    result = layer.read()
    layer.free()
    return build.output(hidden, result)
