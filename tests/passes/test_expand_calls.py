"""A call of a group is replaced by its ops, with their fake values, before anything else sees the graph."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_fsdp.compat import set_version_counter
from compile_fsdp.passes import expand_calls
from render import render


def halves(x: torch.Tensor, sizes: list[int], others: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    parts = (x + others[0]).split(sizes)
    return tuple([parts[i].relu() for i in range(len(sizes))])


def total(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.sum.default(x)


def clear(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.ops.inductor.resize_storage_bytes_.default(tensor, 0)


def _graph() -> fx.Graph:
    with FakeTensorMode():
        x, y = torch.empty(6), torch.empty(6)
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["example_value"], b.meta["example_value"] = x, y
    parts = graph.call_function(halves, (a, [4, 2], [b]))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    summed = graph.call_function(total, (first,))
    graph.call_function(clear, ([a, b],))
    graph.output((summed, second))
    return graph


def test_calls_become_their_ops() -> None:
    graph = _graph()
    expand_calls(graph, {halves, total, clear})
    graph.lint()
    assert_expected_inline(render(graph), """\
a: f32[6]
b: f32[6]
%0: f32[6] = add(a, b)
%1 = .split(%0, [4, 2])
%2: f32[4] = getitem(%1, 0)
%3: f32[4] = .relu(%2)
%4: f32[2] = getitem(%1, 1)
%5: f32[2] = .relu(%4)
%6: f32[] = sum(%3)
resize_storage_bytes_(a, 0)
resize_storage_bytes_(b, 0)
return (%6, %5)
""")


def test_the_graph_computes_what_the_calls_do() -> None:
    x, y = torch.randn(6), torch.randn(6)
    graph = _graph()
    expand_calls(graph, {halves, total})
    summed, second = fx.GraphModule({}, graph)(x.clone(), y.clone())
    parts = halves(x, [4, 2], [y])
    assert torch.equal(summed, parts[0].sum()) and torch.equal(second, parts[1])


def test_other_calls_stay() -> None:
    graph = _graph()
    before = render(graph)
    expand_calls(graph, set())
    assert render(graph) == before


def test_what_a_call_writes_is_not_written_again() -> None:
    def refill(tensors: list[torch.Tensor], values: list[torch.Tensor], sizes: list[int]) -> None:
        for tensor, value, size in zip(tensors, values, sizes, strict=True):
            torch.ops.inductor.resize_storage_bytes_.default(tensor, size)
            torch.ops.fsdp.copy_.default(tensor, value)
            set_version_counter((tensor,), (7,))

    graph = _graph()
    a, b = graph.find_nodes(op="placeholder")
    with graph.inserting_before(graph.output_node()):
        graph.call_function(refill, ([a], [b], [64]))
    value = a.meta["example_value"]
    before = (value._version, value.untyped_storage().nbytes())
    expand_calls(graph, {refill})
    assert len([node for node in graph.nodes if node.target is set_version_counter]) == 1
    assert (value._version, value.untyped_storage().nbytes()) == before
