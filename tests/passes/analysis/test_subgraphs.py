"""Subgraphs that a pass may rewrite separately."""

from __future__ import annotations

import torch
from torch import fx

from compile_fsdp.passes.analysis.subgraphs import find_window_subgraphs
from helpers.graphs.build import GraphBuilder, aten

checkpoint = torch.ops.higher_order.wrap_activation_checkpoint


def call_subgraph(build: GraphBuilder, name: str, module: fx.GraphModule) -> None:
    inputs = [build.input(f"{name}_{each}", (4, 4)) for each in "xw"]
    build.call_opaque(checkpoint, build.subgraph(name, module), *inputs, value=4)


def test_inner_subgraphs_come_first_and_subgraphs_without_a_window_are_left_out(build: GraphBuilder) -> None:
    inner, outer, plain = (GraphBuilder(fake_mode=build.fake_mode) for _ in range(3))
    for body in (inner, outer, plain):
        x, w = body.input("x", (4, 4)), body.input("w", (4, 4))
        if body is not plain:
            body.fill(w, x)
            body.free(w)
    call_subgraph(outer, "inner", inner.output_module())
    call_subgraph(build, "outer", outer.output_module())
    call_subgraph(build, "plain", plain.output_module(plain.call(aten.mm.default, x, w)))
    assert [path for path, _ in find_window_subgraphs(build.output())] == ["outer.inner", "outer"]
