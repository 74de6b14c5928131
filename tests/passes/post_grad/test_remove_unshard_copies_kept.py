"""One graph per reason to keep a window: the reason is named, and the graph comes back untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.passes import Kept
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from helpers.graphs.build import GraphBuilder, Layer, aten, c10d, subgraph_with_window
from helpers.graphs.render import render

# A case builds a window up to its read. The test adds the read and the free, unless the case returns results.
Case = Callable[[GraphBuilder, Layer], object]
higher_order = torch.ops.higher_order


def resized(build: GraphBuilder, layer: Layer, size_bytes: int | fx.Node) -> None:
    build.resize(layer.weight, size_bytes)
    layer.copy()


# Cases that replace the fill.
CASES: dict[str, tuple[Kept, Case]] = {
    "converted": (Kept.COPY_CONVERTS, lambda build, layer: layer.fill(build.input("other", (4, 4), torch.bfloat16))),
    "broadcast row": (Kept.COPY_BROADCASTS, lambda build, layer: layer.fill(build.input("other", (1, 4)))),
    "broadcast vector": (Kept.COPY_BROADCASTS, lambda build, layer: layer.fill(build.input("other", (4,)))),
    "transposed": (Kept.COPY_RESTRIDES, lambda build, layer: layer.fill(build.call(aten.t.default, layer.value))),
    "of unknown layout": (
        Kept.UNKNOWN_LAYOUT,
        lambda build, layer: layer.fill(build.call_opaque(aten.neg.default, layer.value)),
    ),
    "resized to too little": (Kept.NOT_FULL, lambda build, layer: resized(build, layer, 60)),
    "resized to an unknown size": (Kept.NOT_FULL, lambda build, layer: resized(build, layer, build.size("size"))),
    "resized to a size without a value": (
        Kept.NOT_FULL,
        lambda build, layer: resized(build, layer, build.call_opaque(len, layer.x)),
    ),
    "never filled": (Kept.NO_COPY, lambda build, layer: layer.full()),
    "read before the window": (Kept.READ_OUTSIDE, lambda build, layer: layer.add("read fill read free")[1:]),
    "read after the window": (Kept.READ_OUTSIDE, lambda build, layer: layer.add("fill free read")),
    "copied into before the resize": (Kept.COPY_OUTSIDE, lambda build, layer: layer.add("copy full read free")),
    "read before the copy": (Kept.READ_BEFORE_COPY, lambda build, layer: layer.add("full read copy read free")[1:]),
}

# Changes between the fill and the read.
INSIDE: dict[str, tuple[Kept, Case]] = {
    "view resized": (Kept.MUTATED, lambda build, layer: build.free(build.call(aten.t.default, layer.weight))),
    "parameter mutated": (Kept.MUTATED, lambda build, layer: layer.write()),
    "view mutated": (Kept.MUTATED, lambda build, layer: layer.write(build.call(aten.t.default, layer.weight))),
    "given to an unknown callable": (Kept.MUTATED, lambda build, layer: build.call_opaque(len, layer.weight, value=4)),
    "given to a triton kernel": (
        Kept.MUTATED,
        lambda build, layer: build.call_opaque(
            higher_order.triton_kernel_wrapper_mutation, kernel_idx=0, kwargs={"in_ptr": layer.weight}
        ),
    ),
    "value mutated": (Kept.VALUE_MUTATED, lambda build, layer: layer.write_value()),
    "value freed": (Kept.VALUE_RESIZED, lambda build, layer: build.free(layer.value)),
    "view of the value freed": (
        Kept.VALUE_RESIZED,
        lambda build, layer: build.free(build.call(aten.select.int, layer.value, 0, 0)),
    ),
    "view of the value mutated": (
        Kept.VALUE_MUTATED,
        lambda build, layer: layer.write(build.call(aten.select.int, layer.value, 0, 0)),
    ),
    "filled twice": (Kept.TWO_COPIES, lambda build, layer: build.copy(layer.weight, layer.x)),
    "filled again without a free": (Kept.REFILLED, lambda build, layer: layer.fill(layer.x)),
    "read through as_strided": (
        Kept.READ_BY_STORAGE,
        lambda build, layer: build.call(
            aten.neg.default, build.call(aten.as_strided.default, layer.weight, [2], [1], 1)
        ),
    ),
}


def case(reason: Kept) -> Callable[[Case], Case]:
    def register(build_case: Case) -> Case:
        CASES[build_case.__name__] = reason, build_case
        return build_case

    return register


def inside(change: Case) -> Case:
    def build_case(build: GraphBuilder, layer: Layer) -> None:
        layer.fill()
        change(build, layer)

    return build_case


CASES |= {name: (reason, inside(change)) for name, (reason, change) in INSIDE.items()}


@case(Kept.MUTATED)
def parameter_mutated_in_a_subgraph(build: GraphBuilder, layer: Layer) -> None:
    body = GraphBuilder(fake_mode=build.fake_mode)
    inner = body.input("w", (4, 4))
    body.call(aten.add_.Tensor, inner, 1)
    layer.fill()
    region = build.subgraph("region", body.output_module(inner))
    build.call_opaque(higher_order.wrap_activation_checkpoint, region, layer.weight)


@case(Kept.VALUE_MUTATED)
def buffer_of_awaited_value_is_the_target_of_a_gather(build: GraphBuilder, layer: Layer) -> None:
    shard = build.input("shard", (2, 4))
    buffer = build.call(c10d.all_gather_into_tensor.default, shard, 2, "dp")
    layer.fill(build.call(c10d.wait_tensor.default, buffer))
    build.call(c10d.all_gather_into_tensor_out.default, shard, 2, "dp", out=buffer)


@case(Kept.VALUE_MUTATED)
def value_without_metadata_may_alias(build: GraphBuilder, layer: Layer) -> None:
    unknown = build.call_opaque(aten.view.default, layer.value, [4, 4])
    layer.fill()
    build.graph.call_function(aten.add_.Tensor, (unknown, 1))


@case(Kept.VIEW_OUTLIVES)
def view_used_after_the_free(build: GraphBuilder, layer: Layer) -> list[fx.Node]:
    layer.fill()
    view = build.call(aten.t.default, layer.weight)
    layer.free()
    layer.fill(layer.x)
    late = build.call(aten.mm.default, layer.x, view)
    layer.free()
    return [late]


@case(Kept.VIEW_ESCAPES)
def view_returned(build: GraphBuilder, layer: Layer) -> list[fx.Node]:
    layer.fill()
    view = build.call(aten.t.default, layer.weight)
    layer.free()
    return [view]


@case(Kept.SHARED_STORAGE)
def second_input_in_the_storage(build: GraphBuilder, layer: Layer) -> None:
    with build.fake_mode:
        tied = build.input_like("tied", build.value(layer.weight).t())
    layer.fill()
    build.call(aten.mm.default, layer.x, tied)


@case(Kept.CHAINED)
def parameter_fills_another(build: GraphBuilder, layer: Layer) -> None:
    other = build.input("other", (4, 4))
    layer.fill()
    build.fill(other, layer.weight)
    build.free(other)


@case(Kept.RESULT_USED)
def result_of_the_resize_used(build: GraphBuilder, layer: Layer) -> None:
    resize = build.full(layer.weight)
    build.copy(layer.weight, layer.value)
    build.graph.call_function(torch.sym_not, (resize,))


@pytest.mark.parametrize("name", CASES)
def test_window_is_kept(layer: Layer, name: str) -> None:
    reason, build_case = CASES[name]
    results = build_case(layer.build, layer)
    if not isinstance(results, list):
        results = layer.add("read free")
    graph = layer.build.output(*results)
    before = render(graph)
    report = remove_unshard_copies(graph)
    assert ("weight", reason) in report.kept
    assert (report.windows_removed, report.bytes_removed, report.nodes_before) == (0, 0, report.nodes_after)
    assert render(graph) == before


def test_every_reason_has_a_case() -> None:
    elsewhere = {Kept.OPEN_AT_START, Kept.OPEN_AT_RETURN, Kept.DOUBLE_FREE}
    assert {reason for reason, _ in CASES.values()} == set(Kept) - elsewhere


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        pytest.param("fill read free fill write free", [Kept.MUTATED], id="another window is faulty"),
        pytest.param("fill read free free", [Kept.DOUBLE_FREE], id="freed twice"),
        pytest.param("full write_value copy read free", [], id="value written before its copy"),
        pytest.param("fill read free write_value", [], id="value written after its window"),
    ],
)
def test_window_without_a_fault_is_removed(layer: Layer, steps: str, kept: list[Kept]) -> None:
    report = remove_unshard_copies(layer.build.output(*layer.add(steps)))
    assert (report.windows_removed, report.kept) == (1, tuple(("weight", reason) for reason in kept))


@pytest.mark.parametrize("case", ["gets a storage twice", "is called by an unknown function"])
def test_window_in_a_subgraph_is_kept(layer: Layer, case: str) -> None:
    if case == "gets a storage twice":
        target, x = higher_order.wrap_activation_checkpoint, layer.build.call(aten.t.default, layer.weight)
    else:
        target, x = print, layer.x
    layer.build.call_opaque(target, subgraph_with_window(layer.build), x, layer.weight, value=4)
    assert remove_unshard_copies(layer.build.output(layer.x)).windows_removed == 0


def test_report_names_parameters(layer: Layer) -> None:
    graph = layer.build.output(*layer.add("fill read"))
    report = remove_unshard_copies(graph, lambda node: f"layers.3.{node.name}")
    assert str(report) == (
        "remove_unshard_copies: 0 of 1 windows removed, 0 B; kept 1 (open at return: layers.3.weight)"
    )


@pytest.mark.parametrize("is_attribute", [False, True], ids=["intermediate", "attribute"])
def test_resize_of_a_tensor_that_is_no_input_opens_no_window(layer: Layer, is_attribute: bool) -> None:
    build = layer.build
    buffer = build.attribute("buffer", (4, 4)) if is_attribute else build.call(aten.neg.default, layer.value)
    build.fill(buffer, layer.value)
    result = build.call(aten.neg.default, buffer)
    build.free(buffer)
    graph = build.output(result)
    before = render(graph)
    report = remove_unshard_copies(graph)
    assert (report.windows_removed, report.kept, render(graph)) == (0, (), before)


def test_window_beside_a_constant_is_removed(layer: Layer) -> None:
    module = layer.build.output_module(*layer.add("fill read free"))
    module.register_buffer("constant", torch.empty(4))
    with module.graph.inserting_before():
        module.graph.get_attr("constant")
    assert remove_unshard_copies(module.graph).windows_removed == 1
