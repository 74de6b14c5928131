"""One graph per reason to keep a window: the reason is named, and the graph comes back untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.passes import Kept
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from helpers.graphs.build import GraphBuilder, Layer, aten, c10d
from helpers.graphs.render import render

Case = Callable[[Layer], list[fx.Node]]
CASES: list[tuple[Kept, Case]] = []


def case(reason: Kept) -> Callable[[Case], Case]:
    def register(build_case: Case) -> Case:
        CASES.append((reason, build_case))
        return build_case

    return register


def filled_with(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Case:
    def build_case(layer: Layer) -> list[fx.Node]:
        layer.fill(layer.build.input("other", shape, dtype))
        result = layer.read()
        layer.free()
        return [result]

    return build_case


case(Kept.COPY_CONVERTS)(filled_with((4, 4), torch.bfloat16))
case(Kept.COPY_BROADCASTS)(filled_with((1, 4)))
case(Kept.COPY_BROADCASTS)(filled_with((4,)))


@case(Kept.COPY_RESTRIDES)
def transposed_value(layer: Layer) -> list[fx.Node]:
    layer.fill(layer.build.call(aten.t.default, layer.value))
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.NOT_FULL)
def resized_to_too_little(layer: Layer) -> list[fx.Node]:
    layer.build.resize(layer.weight, 60)
    layer.build.copy(layer.weight, layer.value)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.NOT_FULL)
def resized_to_an_unknown_size(layer: Layer) -> list[fx.Node]:
    shape_env = layer.build.fake_mode.shape_env
    assert shape_env is not None
    size = layer.build.input_like("size", shape_env.create_unbacked_symint())
    layer.build.resize(layer.weight, size)
    layer.build.copy(layer.weight, layer.value)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.NOT_FULL)
def resized_to_a_size_without_a_value(layer: Layer) -> list[fx.Node]:
    layer.build.resize(layer.weight, layer.build.call_opaque(len, layer.x))
    layer.build.copy(layer.weight, layer.value)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.VALUE_RESIZED)
def resize_of_a_view_of_the_value(layer: Layer) -> list[fx.Node]:
    row = layer.build.call(aten.select.int, layer.value, 0, 0)
    layer.fill()
    layer.build.free(row)
    layer.free()
    return [layer.x]


@case(Kept.MUTATED)
def view_of_parameter_resized(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.free(layer.build.call(aten.t.default, layer.weight))
    layer.free()
    return [layer.x]


@case(Kept.MUTATED)
def parameter_mutated(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.call(aten.add_.Tensor, layer.weight, 1)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.MUTATED)
def view_of_parameter_mutated(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.call(aten.mul_.Tensor, layer.build.call(aten.t.default, layer.weight), 2)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.MUTATED)
def parameter_given_to_an_unknown_callable(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.call_opaque(len, layer.weight, value=4)
    layer.free()
    return [layer.x]


@case(Kept.MUTATED)
def parameter_given_to_a_triton_kernel(layer: Layer) -> list[fx.Node]:
    layer.fill()
    op = torch.ops.higher_order.triton_kernel_wrapper_mutation
    layer.build.call_opaque(op, kernel_idx=0, kwargs={"in_ptr": layer.weight})
    layer.free()
    return [layer.x]


@case(Kept.MUTATED)
def parameter_mutated_in_a_subgraph(layer: Layer) -> list[fx.Node]:
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    inner = body.input("w", (4, 4))
    body.call(aten.add_.Tensor, inner, 1)
    layer.fill()
    region = layer.build.subgraph("region", body.output_module(inner))
    op = torch.ops.higher_order.wrap_activation_checkpoint
    layer.build.call_opaque(op, region, layer.weight)
    layer.free()
    return [layer.x]


@case(Kept.VALUE_MUTATED)
def value_mutated(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.call(aten.add_.Tensor, layer.value, 1)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.VALUE_MUTATED)
def alias_of_value_mutated(layer: Layer) -> list[fx.Node]:
    row = layer.build.call(aten.select.int, layer.value, 0, 0)
    layer.fill()
    layer.build.call(aten.zero_.default, row)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.VALUE_MUTATED)
def buffer_of_awaited_value_is_the_target_of_a_gather(layer: Layer) -> list[fx.Node]:
    build = layer.build
    shard = build.input("shard", (2, 4))
    buffer = build.call(c10d.all_gather_into_tensor.default, shard, 2, "dp")
    layer.fill(build.call(c10d.wait_tensor.default, buffer))
    build.call(c10d.all_gather_into_tensor_out.default, shard, 2, "dp", out=buffer)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.VALUE_MUTATED)
def value_without_metadata_may_alias(layer: Layer) -> list[fx.Node]:
    unknown = layer.build.call_opaque(torch.ops.aten.view.default, layer.value, [4, 4])
    layer.fill()
    layer.build.graph.call_function(aten.add_.Tensor, (unknown, 1))
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.READ_OUTSIDE)
def read_before_the_window(layer: Layer) -> list[fx.Node]:
    early = layer.read()
    layer.fill()
    result = layer.read()
    layer.free()
    return [early, result]


@case(Kept.READ_OUTSIDE)
def read_after_the_window(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.free()
    return [layer.read()]


@case(Kept.COPY_OUTSIDE)
def copied_into_before_the_resize(layer: Layer) -> list[fx.Node]:
    layer.build.copy(layer.weight, layer.value)
    layer.build.full(layer.weight)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.VIEW_OUTLIVES)
def view_used_after_the_free(layer: Layer) -> list[fx.Node]:
    layer.fill()
    view = layer.build.call(aten.t.default, layer.weight)
    layer.free()
    layer.build.full(layer.weight)
    layer.build.copy(layer.weight, layer.x)
    late = layer.build.call(aten.mm.default, layer.x, view)
    layer.free()
    return [late]


@case(Kept.VIEW_ESCAPES)
def view_returned(layer: Layer) -> list[fx.Node]:
    layer.fill()
    view = layer.build.call(aten.t.default, layer.weight)
    layer.free()
    return [view]


@case(Kept.SHARED_STORAGE)
def second_input_in_the_storage(layer: Layer) -> list[fx.Node]:
    with layer.build.fake_mode:
        tied = layer.build.input_like("tied", layer.build.value(layer.weight).t())
    layer.fill()
    result = layer.build.call(aten.mm.default, layer.x, tied)
    layer.free()
    return [result]


@case(Kept.NO_COPY)
def never_filled(layer: Layer) -> list[fx.Node]:
    layer.build.full(layer.weight)
    layer.free()
    return [layer.x]


@case(Kept.TWO_COPIES)
def filled_twice(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.copy(layer.weight, layer.x)
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.READ_BEFORE_COPY)
def read_before_the_copy(layer: Layer) -> list[fx.Node]:
    layer.build.full(layer.weight)
    early = layer.read()
    layer.build.copy(layer.weight, layer.value)
    layer.free()
    return [early]


@case(Kept.REFILLED)
def filled_again_without_a_free(layer: Layer) -> list[fx.Node]:
    layer.fill()
    first = layer.read()
    layer.fill(layer.x)
    second = layer.read()
    layer.free()
    return [first, second]


@case(Kept.CHAINED)
def parameter_fills_another(layer: Layer) -> list[fx.Node]:
    other = layer.build.input("other", (4, 4))
    layer.fill()
    layer.build.fill(other, layer.weight)
    return [layer.read(), layer.build.free(other), layer.free()][:1]


@case(Kept.VALUE_RESIZED)
def value_is_freed_first(layer: Layer) -> list[fx.Node]:
    layer.fill()
    layer.build.free(layer.value)
    layer.free()
    return [layer.x]


@case(Kept.READ_BY_STORAGE)
def read_through_as_strided(layer: Layer) -> list[fx.Node]:
    layer.fill()
    result = layer.build.call(aten.as_strided.default, layer.weight, [2], [1], 1)
    result = layer.build.call(aten.neg.default, result)
    layer.free()
    return [result]


@case(Kept.UNKNOWN_LAYOUT)
def value_of_unknown_layout(layer: Layer) -> list[fx.Node]:
    layer.fill(layer.build.call_opaque(aten.neg.default, layer.value))
    result = layer.read()
    layer.free()
    return [result]


@case(Kept.RESULT_USED)
def result_of_the_resize_used(layer: Layer) -> list[fx.Node]:
    resize = layer.build.full(layer.weight)
    layer.build.copy(layer.weight, layer.value)
    layer.build.graph.call_function(torch.sym_not, (resize,))
    layer.free()
    return [layer.x]


@pytest.mark.parametrize(
    ("reason", "build_case"),
    [pytest.param(reason, f, id=f"{reason.name}-{f.__name__}") for reason, f in CASES],
)
def test_window_is_kept(reason: Kept, build_case: Case) -> None:
    layer = Layer()
    graph = layer.build.output(*build_case(layer))
    before = render(graph)
    report = remove_unshard_copies(graph)
    assert ("weight", reason) in report.kept
    assert (report.windows_removed, report.bytes_removed, report.nodes_before) == (0, 0, report.nodes_after)
    assert render(graph) == before


def test_every_reason_has_a_case() -> None:
    elsewhere = {Kept.OPEN_AT_START, Kept.OPEN_AT_RETURN, Kept.DOUBLE_FREE}
    assert {reason for reason, _ in CASES} == set(Kept) - elsewhere


def test_only_the_faulty_window_is_kept() -> None:
    layer = Layer()
    layer.fill()
    first = layer.read()
    layer.free()
    parameter_mutated(layer)
    graph = layer.build.output(first)
    report = remove_unshard_copies(graph)
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.MUTATED),))


def test_second_free_stays_and_the_window_is_removed() -> None:
    layer = Layer()
    layer.fill()
    result = layer.read()
    layer.free()
    layer.free()
    report = remove_unshard_copies(layer.build.output(result))
    assert (report.windows_removed, report.kept) == (1, (("weight", Kept.DOUBLE_FREE),))


def test_value_written_before_its_copy_may_be_read() -> None:
    layer = Layer()
    layer.build.full(layer.weight)
    layer.build.call(aten.add_.Tensor, layer.value, 1)
    layer.build.copy(layer.weight, layer.value)
    result = layer.read()
    layer.free()
    assert remove_unshard_copies(layer.build.output(result)).windows_removed == 1


def test_window_in_a_subgraph_that_gets_a_storage_twice_is_kept() -> None:
    layer = Layer()
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    body.fill(w, body.call(aten.neg.default, x))
    inside = body.call(aten.mm.default, x, w)
    body.free(w)
    region = layer.build.subgraph("region", body.output_module(inside))
    view = layer.build.call(aten.t.default, layer.weight)
    op = torch.ops.higher_order.wrap_activation_checkpoint
    layer.build.call_opaque(op, region, view, layer.weight)
    assert remove_unshard_copies(layer.build.output(layer.x)).windows_removed == 0


def test_report_names_parameters() -> None:
    layer = Layer()
    layer.fill()
    graph = layer.build.output(layer.read())
    report = remove_unshard_copies(graph, lambda node: f"layers.3.{node.name}")
    assert str(report) == (
        "remove_unshard_copies: 0 of 1 windows removed, 0 MiB; kept 1 (open at return: layers.3.weight)"
    )


def test_resize_of_an_intermediate_opens_no_window() -> None:
    layer = Layer()
    build = layer.build
    buffer = build.call(aten.neg.default, layer.value)
    build.fill(buffer, layer.value)
    result = build.call(aten.neg.default, buffer)
    build.free(buffer)
    graph = build.output(result)
    before = render(graph)
    report = remove_unshard_copies(graph)
    assert (report.windows_removed, report.kept, render(graph)) == (0, (), before)


def test_resize_of_an_attribute_opens_no_window() -> None:
    layer = Layer()
    buffer = layer.build.attribute("buffer", (4, 4))
    layer.build.fill(buffer, layer.value)
    result = layer.build.call(aten.neg.default, buffer)
    layer.build.free(buffer)
    report = remove_unshard_copies(layer.build.output(result))
    assert (report.windows_removed, report.kept) == (0, ())


def test_window_in_a_subgraph_of_an_unknown_call_is_kept() -> None:
    layer = Layer()
    body = GraphBuilder(fake_mode=layer.build.fake_mode)
    x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
    body.fill(w, x)
    inside = body.call(aten.neg.default, w)
    body.free(w)
    region = layer.build.subgraph("region", body.output_module(inside))
    layer.build.call_opaque(print, region, layer.x, layer.weight, value=4)
    assert remove_unshard_copies(layer.build.output(layer.x)).windows_removed == 0


def test_value_written_after_its_window_may_be_read_in_it() -> None:
    layer = Layer()
    layer.fill()
    result = layer.read()
    layer.free()
    layer.build.call(aten.add_.Tensor, layer.value, 1)
    assert remove_unshard_copies(layer.build.output(result)).windows_removed == 1


def test_window_beside_a_constant_is_removed() -> None:
    layer = Layer()
    layer.fill()
    result = layer.read()
    layer.free()
    module = layer.build.output_module(result)
    module.register_buffer("constant", torch.empty(4))
    with module.graph.inserting_before():
        module.graph.get_attr("constant")
    assert remove_unshard_copies(module.graph).windows_removed == 1
