"""Nodes that may share a storage, with and without fake values."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from compile_fsdp.passes.analysis.aliases import Aliases, find_fake_tensor
from compile_fsdp.passes.analysis.effects import Effects
from helpers.graphs.build import GraphBuilder, aten


def aliases_of(build: GraphBuilder) -> Aliases:
    return Aliases(build.graph, Effects(build.graph.owning_module))


def test_constant_is_no_tensor() -> None:
    assert find_fake_tensor(3) is None


def test_view_is_in_the_class_of_its_base(build: GraphBuilder) -> None:
    x, y = build.input("x", (4, 4)), build.input("y", (4, 4))
    view, sum_ = build.call(aten.t.default, x), build.call(aten.add.Tensor, x, y)
    aliases = aliases_of(build)
    assert aliases.classes(view) == aliases.classes(x)
    assert len({*aliases.classes(x), *aliases.classes(y), *aliases.classes(sum_)}) == 3


def test_tensors_without_a_storage_do_not_alias_each_other(build: GraphBuilder) -> None:
    inputs = [build.input_like(name, torch.empty(4, 4, layout=torch.sparse_coo)) for name in "ab"]
    aliases = aliases_of(build)
    assert len({key for each in inputs for key in aliases.classes(each)}) == 2


def test_empty_list_of_views_has_no_class(build: GraphBuilder) -> None:
    empty = build.call(aten.unbind.int, build.input("x", (0, 4)))
    assert aliases_of(build).classes(empty) == ()


def test_node_without_a_value_joins_the_classes_of_its_inputs(build: GraphBuilder) -> None:
    x, y, z = (build.input(name, (4, 4)) for name in "xyz")
    chain = [build.call_opaque(aten.view.default, x, [4, 4])]
    for _ in range(3):
        chain.append(build.call_opaque(torch.ops.aten.add, chain[-1], y))
    aliases = aliases_of(build)
    assert len({key for each in (x, y, *chain) for key in aliases.classes(each)}) == 1
    assert aliases.classes(z) != aliases.classes(x)


def test_attribute_without_a_value_may_be_anything_but_a_subgraph(build: GraphBuilder) -> None:
    body = GraphBuilder(fake_mode=build.fake_mode)
    region = build.subgraph("region", body.output_module(body.input("x", (4, 4))))
    module = build.output_module()
    module.register_buffer("constant", torch.empty(4))
    with module.graph.inserting_before():
        tensor = module.graph.get_attr("constant")
    aliases = Aliases(module.graph, Effects(module))
    assert aliases.classes(region) == ()
    assert len(aliases.classes(tensor)) == 1


def test_called_module_without_a_value_may_return_its_input(build: GraphBuilder) -> None:
    body = GraphBuilder(fake_mode=build.fake_mode)
    build.subgraph("region", body.output_module(body.input("x", (4, 4))))
    x = build.input("x", (4, 4))
    called = build.graph.call_module("region", (x,))
    aliases = Aliases(build.graph, Effects(build.output_module()))
    assert aliases.classes(called) == aliases.classes(x) != ()


def test_wrapper_subclass_is_in_the_classes_of_its_inner_tensors(build: GraphBuilder) -> None:
    a, b = torch.empty(4), torch.empty(4)
    inputs = [build.input_like("a", a), build.input_like("b", b), build.input_like("both", TwoTensor(a, b))]
    classes = [aliases_of(build).classes(each) for each in inputs]
    assert classes[2] == classes[0] + classes[1]
