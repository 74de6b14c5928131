"""Sizes and times of nodes, and nodes that count as nothing."""

from __future__ import annotations

import math

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from compile_fsdp import ops
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.collectives import numel
from compile_fsdp.passes.analysis.costs import (
    communication,
    compute_seconds,
    size_bytes,
    usual_compute_seconds,
    work_of,
)
from helpers.graphs.build import GATHER, REDUCE, GraphBuilder, aten, c10d

COSTS = Costs(latency=1.0, comm_bandwidth=1.0, memory_bandwidth=1.0, flops=1.0, rows=8)


def test_flops_with_symbolic_sizes_are_those_of_the_present_sizes(build: GraphBuilder) -> None:
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = build.input_like("x", build.fake_mode.from_tensor(torch.ones(3, 4), symbolic_context=context))
    gradient = build.call(aten.mm.default, build.call(aten.t.default, x), x)
    flops, moved = work_of(gradient)
    assert (flops, moved, type(flops)) == (2 * 4 * 3 * 4, 64, int)
    assert work_of(build.call(aten.mm.default, x, gradient)) == (0, 0)  # of unknown size


def test_sizes_that_are_symbolic_or_missing_count_as_unknown(build: GraphBuilder) -> None:
    x, weight = build.input("x", (build.value(build.size("rows")), 4)), build.input("weight", (4, 4))
    product = build.call(aten.mm.default, x, weight)
    for unknown in (x, build.call_opaque(math.sin, weight)):
        assert (size_bytes(unknown), numel(unknown)) == (0, -1)
    assert (size_bytes(weight), numel(weight)) == (64, 16)
    assert compute_seconds(product, COSTS) == 0.0


def test_views_and_unknown_functions_take_no_time_and_products_take_their_flops(build: GraphBuilder) -> None:
    x = build.input("x", (4, 4))
    view, stranger = build.call(aten.t.default, x), build.call_opaque(math.sin, x, value=build.value(x))
    assert compute_seconds(view, COSTS) == compute_seconds(stranger, COSTS) == 0.0
    assert compute_seconds(build.call(aten.neg.default, x), COSTS) == 64
    assert compute_seconds(build.call(aten.mm.default, x, x), COSTS) == 2 * 4**3


def test_only_products_and_blocks_take_time_with_the_usual_batch(build: GraphBuilder) -> None:
    x = build.input("x", (4, 4))
    product, sum_ = build.call(aten.mm.default, x, x), build.call(aten.add.Tensor, x, x)
    blocks = [build.graph.call_function(op, ([x], [], "block")) for op in ops.BLOCK_CALLS]
    for each in (product, *blocks):
        assert usual_compute_seconds(each, 16, COSTS) == 2 * 8 * 16
    assert usual_compute_seconds(sum_, 16, COSTS) == 0.0


def test_collectives_and_copies_to_the_host_take_time_by_their_bytes(build: GraphBuilder) -> None:
    costs = Costs(latency=1.0, comm_bandwidth=2.0, memory_bandwidth=1.0, flops=1.0, offload_bandwidth=4.0)
    x = build.input("x", (16,))  # 64 bytes
    away = build.call(ops.offload, x, [], True)
    assert communication(build.call(GATHER, x, 4, "dp"), costs) == (256, 1 + 64 * 3 / 2)
    assert communication(build.call(REDUCE, x, "sum", 4, "dp"), costs) == (64, 1 + 16 * 3 / 2)
    assert communication(build.call(c10d.all_reduce.default, x, "sum", "dp"), costs) == (64, 1 + 2 * 64 / 2)
    assert communication(away, costs) == (64, 64 / 4)
    assert (COSTS.collectives(2, 64, 2), COSTS.collectives(0, 64, 2), COSTS.transfer(64)) == (1 + 64 + 1, 0.0, 0.0)
    assert communication(build.call(ops.fetch, away, torch.device("cpu")), costs) == (64, 64 / 4)
