"""Packs of parameters and gradients are made anew; gathered and reduced values do not change."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.collectives import CAST, is_gather, is_reduction, name_of
from compile_fsdp.passes.post_grad.pack_gathers import pack_gathers
from compile_fsdp.passes.post_grad.pack_reductions import pack_reductions
from compile_fsdp.passes.post_grad.packing import Merge
from helpers.graphs.build import GATHER, REDUCE, GraphBuilder, aten, gather, name_collectives, reduce
from helpers.graphs.lockstep import same_results
from helpers.graphs.render import render, render_calls


def above(elements: int, pack: float = 1e9) -> Costs:
    """Costs at which a collective is cheaper than copies of more than `elements` float32 elements.

    Each copy reads and writes. A pack of two ranks' shards with at most `pack` elements is not split.
    """
    latency = 8 * elements
    return Costs(latency, comm_bandwidth=2 * pack / max(latency, 1), memory_bandwidth=1.0, flops=1.0)


def gather_graph(numels: list[int], ranks: int = 2, cast: torch.dtype | None = None) -> fx.Graph:
    build = GraphBuilder()
    shards = [build.input(f"shard{i}", (numel,)) for i, numel in enumerate(numels)]
    if cast is not None:
        shards = [build.call(CAST, each, cast) for each in shards]
    return build.output(*(build.call(aten.neg.default, each) for each in gather(build, shards, ranks)))


def reduce_graph(numels: list[int], ranks: int = 2, cast: torch.dtype | None = None) -> fx.Graph:
    """Reductions of one gradient (ranks, numel) for each numel."""
    build = GraphBuilder()
    inputs = [build.input(f"g{i}", (ranks, numel)) for i, numel in enumerate(numels)]
    grads = [build.call(aten.neg.default, each) for each in inputs]
    if cast is not None:
        grads = [build.call(CAST, each, cast) for each in grads]
    return build.output(*reduce(build, grads, ranks))


def test_large_parameter_is_gathered_alone() -> None:
    graph = gather_graph([2, 16, 3])
    # 16 elements are copied into the pack, and 32 out of it.
    report = pack_gathers(graph, costs=above(47))
    assert_expected_inline(render_calls(graph), """\
%0: f32[5] = cat([shard0, shard2], 0)
%1: f32[10] = all_gather_into_tensor(%0, 2, 'dp')
%2: f32[10] = wait_tensor(%1)
%3: f32[2, 5] = reshape(%2, [2, 5])
%4 = split_with_sizes_copy(%3, [2, 3], 1)
%5: f32[2, 2] = getitem(%4, 0)
%6: f32[2, 3] = getitem(%4, 1)
%7: f32[32] = all_gather_into_tensor(shard1, 2, 'dp')
%8: f32[32] = wait_tensor(%7)
%9: f32[2, 16] = reshape(%8, [2, 16])
%10: f32[2, 2] = neg(%5)
%11: f32[2, 16] = neg(%9)
%12: f32[2, 3] = neg(%6)
return (%10, %11, %12)
""")
    assert dict(report.counts) == {"gathers_packed_anew": 1, "now": 2, "gathered_alone": 1, "bytes_not_copied": 4 * 48}
    assert str(report) == "pack_gathers: gathers packed anew 1, now 2, gathered alone 1, not copied 192 B"


def test_parameter_at_the_bound_stays_packed() -> None:
    graph = gather_graph([2, 16, 3])
    assert dict(pack_gathers(graph, costs=above(48)).counts)["gathered_alone"] == 0
    assert len(graph.find_nodes(op="call_function", target=GATHER)) == 1


def test_large_pack_is_split_by_bytes() -> None:
    graph = gather_graph([2, 3, 4, 5, 6])
    assert dict(pack_gathers(graph, costs=above(1000, pack=9)).counts)["gathers_packed_anew"] == 1
    sent = [node.args[0] for node in graph.find_nodes(op="call_function", target=GATHER)]
    assert [each.meta["val"].numel() for each in sent] == [9, 5, 6]


def test_lone_small_parameter_needs_no_pack() -> None:
    graph = gather_graph([1, 16])
    pack_gathers(graph, costs=above(40))
    sent = [node.args[0] for node in graph.find_nodes(op="call_function", target=GATHER)]
    assert [str(each) for each in sent] == ["shard0", "shard1"]


def test_large_gradient_is_reduced_alone() -> None:
    graph = reduce_graph([2, 16, 3])
    report = pack_reductions(graph, costs=above(31))
    assert_expected_inline(render_calls(graph), """\
%0: f32[2, 2] = neg(g0)
%1: f32[2, 16] = neg(g1)
%2: f32[2, 3] = neg(g2)
%3: f32[2, 2] = reshape(%0, [2, -1])
%4: f32[2, 16] = reshape(%1, [2, -1])
%5: f32[2, 3] = reshape(%2, [2, -1])
%6: f32[2, 5] = cat([%3, %5], 1)
%7: f32[10] = reshape(%6, [-1])
%8: f32[5] = reduce_scatter_tensor(%7, 'avg', 2, 'dp')
%9: f32[5] = wait_tensor(%8)
%10 = split_with_sizes_copy(%9, [2, 3], 0)
%11: f32[2] = getitem(%10, 0)
%12: f32[3] = getitem(%10, 1)
%13: f32[32] = reshape(%4, [-1])
%14: f32[16] = reduce_scatter_tensor(%13, 'avg', 2, 'dp')
%15: f32[16] = wait_tensor(%14)
return (%11, %15, %12)
""")
    expected = {"reductions_packed_anew": 1, "now": 2, "reduced_alone": 1, "bytes_not_copied": 4 * 32}
    assert dict(report.counts) == expected


def test_ops_on_the_pack_are_applied_to_each_gradient(build: GraphBuilder) -> None:
    inputs = [build.input(f"g{i}", (2, numel), torch.bfloat16) for i, numel in enumerate((4, 16))]
    rows = [build.call(aten.reshape.default, each, [2, -1]) for each in inputs]
    flat = build.call(aten.reshape.default, build.call(aten.cat.default, rows, 1), [-1])
    sent = build.call(aten.mul.Tensor, flat, 0.25)
    launched = build.call(REDUCE, sent, "sum", 2, "dp")
    waited = build.call(torch.ops._c10d_functional.wait_tensor.default, launched)
    cast = build.call(CAST, waited, torch.float32)
    split = build.call(ops.split_with_sizes_copy, cast, [4, 16], 0)
    graph = build.output(*(build.call(operator.getitem, split, i) for i in range(2)))
    with same_results(graph):
        assert dict(pack_reductions(graph, costs=above(8)).counts)["reduced_alone"] == 2


def test_pack_whose_result_is_read_as_a_whole_stays(build: GraphBuilder) -> None:
    inputs = [build.input(f"g{i}", (2, 16)) for i in range(2)]
    items = reduce(build, inputs, 2)
    whole = items[0].args[0].args[0]  # type: ignore[union-attr]
    graph = build.output(*items, whole)  # type: ignore[arg-type]
    before = render(graph)
    pack_reductions(graph, costs=above(0))
    assert render(graph) == before


def _kept_layers(free: bool = False, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """Two groups of two parameters each, gathered one after the other and kept, or freed."""
    build = GraphBuilder()
    numels = ((2, 3), (1, 3))
    shards = [[build.input(f"s{i}{numel}", (numel,)) for numel in group] for i, group in enumerate(numels)]
    weights = [[build.input(f"w{i}{numel}", (2, numel), dtype) for numel in group] for i, group in enumerate(numels)]
    results = []
    for own, targets in zip(shards, weights, strict=True):
        sent = own if dtype is torch.float32 else [build.call(CAST, shard, dtype) for shard in own]
        for weight, value in zip(targets, gather(build, sent, 2), strict=True):
            build.fill(weight, value)
        results.append(build.call(aten.sum.default, targets[0]))
        if free:
            for weight in targets:
                build.free(weight)
    return build.output(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_that_stay_unsharded_are_gathered_in_one_pack(dtype: torch.dtype) -> None:
    graph = _kept_layers(dtype=dtype)
    report = pack_gathers(graph, merge=Merge.ALL, costs=above(1000))
    graph.lint()
    assert dict(report.counts) == {"gathers_packed_anew": 2, "now": 1, "gathered_alone": 0, "bytes_not_copied": 0}
    (node,) = graph.find_nodes(op="call_function", target=GATHER)
    assert node.args[0].meta["val"].shape == (9,)


@pytest.mark.parametrize("pack", [9, 1000])
@pytest.mark.parametrize("groups", ["one", "several"])
def test_packs_are_copied_by_ops_that_need_no_compiling(groups: str, pack: int) -> None:
    numels = [2, 3, 4, 5, 6]
    if groups == "one":
        gathers, reductions = gather_graph(numels), reduce_graph(numels)
    else:
        gathers, reductions = _kept_layers(), _two_reductions()
    merge = Merge.NONE if groups == "one" else Merge.ALL
    pack_gathers(gathers, merge=merge, costs=above(1000, pack))
    pack_reductions(reductions, merge=merge, costs=above(1000, pack))
    for graph in (gathers, reductions):
        assert len(graph.find_nodes(op="call_function", target=ops.cat)) == 1
        assert len(graph.find_nodes(op="call_function", target=ops.split_with_sizes_copy)) == 1
        assert not graph.find_nodes(op="call_function", target=aten.cat.default)


@pytest.mark.parametrize(
    ("layers", "merge", "costs", "left"),
    [
        pytest.param({"free": True}, Merge.ALL, above(1000), 2, id="freed"),
        pytest.param({}, Merge.NONE, above(1000), 2, id="unmerged"),
        pytest.param({}, Merge.ALL, above(1000, 5 / 4), 2, id="too large"),
        pytest.param({}, Merge.SMALL, above(1000, 17), 2, id="not small"),
        pytest.param({}, Merge.ALL, above(1000, 5), 1, id="merged, above the usual pack size"),
        pytest.param({"free": True}, Merge.SMALL, above(1000, 18), 1, id="small, though freed"),
        pytest.param({"free": True, "dtype": torch.bfloat16}, Merge.SMALL, above(1000, 18), 1, id="small, in bfloat16"),
        pytest.param({"free": True}, Merge.SMALL, None, 1, id="small, by the built-in costs"),
    ],
)
def test_packs_are_joined_unless_freed_unmerged_or_too_large(
    layers: dict[str, Any], merge: Merge, costs: Costs | None, left: int
) -> None:
    graph = _kept_layers(**layers)
    with same_results(graph):
        report = pack_gathers(graph, merge=merge, costs=costs)
    assert len(graph.find_nodes(op="call_function", target=GATHER)) == left
    assert left == 2 or dict(report.counts)["now"] == 1


def test_small_groups_that_are_gathered_from_activations_stay_apart(build: GraphBuilder) -> None:
    sent = [build.call(aten.neg.default, build.call(aten.neg.default, build.input(f"x{i}", (3,)))) for i in range(4)]
    graph = build.output(*gather(build, sent[:2], 2), *gather(build, sent[2:], 2))
    pack_gathers(graph, merge=Merge.SMALL, costs=above(1000))
    assert len(graph.find_nodes(op="call_function", target=GATHER)) == 2


def _two_reductions(op: str = "avg") -> fx.Graph:
    build = GraphBuilder()
    inputs = [build.input(f"g{i}", (2, numel)) for i, numel in enumerate((2, 3, 4, 5))]
    first = reduce(build, inputs[:2], 2)
    second = reduce(build, inputs[2:], 2)
    if op != "avg":
        node = build.graph.find_nodes(op="call_function", target=REDUCE)[1]
        node.args = (node.args[0], op, *node.args[2:])
    return build.output(*first, *second)


def test_neighbouring_reductions_are_joined_if_their_reduce_ops_match() -> None:
    graph = _two_reductions()
    pack_reductions(graph, costs=above(1000))
    assert len(graph.find_nodes(op="call_function", target=REDUCE)) == 2  # joined only on request
    for pack, left in ((27, 2), (28, 1)):
        graph = _two_reductions()
        assert dict(pack_reductions(graph, merge=Merge.SMALL, costs=above(1000, pack)).counts)["now"] == left
    graph = _two_reductions()
    with same_results(graph):
        assert dict(pack_reductions(graph, merge=Merge.ALL, costs=above(1000)).counts)["now"] == 1
    assert len(graph.find_nodes(op="call_function", target=REDUCE)) == 1
    other = _two_reductions("sum")
    pack_reductions(other, merge=Merge.ALL, costs=above(1000))
    assert len(other.find_nodes(op="call_function", target=REDUCE)) == 2


def test_casts_are_part_of_the_copy_into_a_pack() -> None:
    graph = gather_graph([2, 16, 3], cast=torch.bfloat16)
    pack_gathers(graph, costs=above(20))
    assert_expected_inline(render_calls(graph), """\
%0: bf16[16] = convert_element_type(shard1, torch.bfloat16)
%1: bf16[5] = cat([shard0, shard2], 0, torch.bfloat16)
%2: bf16[10] = all_gather_into_tensor(%1, 2, 'dp')
%3: bf16[10] = wait_tensor(%2)
%4: bf16[2, 5] = reshape(%3, [2, 5])
%5 = split_with_sizes_copy(%4, [2, 3], 1)
%6: bf16[2, 2] = getitem(%5, 0)
%7: bf16[2, 3] = getitem(%5, 1)
%8: bf16[32] = all_gather_into_tensor(%0, 2, 'dp')
%9: bf16[32] = wait_tensor(%8)
%10: bf16[2, 16] = reshape(%9, [2, 16])
%11: bf16[2, 2] = neg(%6)
%12: bf16[2, 16] = neg(%10)
%13: bf16[2, 3] = neg(%7)
return (%11, %12, %13)
""")
    graph = reduce_graph([2, 3], cast=torch.bfloat16)
    pack_reductions(graph, costs=above(20))
    assert_expected_inline(render_calls(graph), """\
%0: f32[2, 2] = neg(g0)
%1: f32[2, 3] = neg(g1)
%2: f32[2, 2] = reshape(%0, [2, -1])
%3: f32[2, 3] = reshape(%1, [2, -1])
%4: bf16[2, 5] = cat([%2, %3], 1, torch.bfloat16)
%5: bf16[10] = reshape(%4, [-1])
%6: bf16[5] = reduce_scatter_tensor(%5, 'avg', 2, 'dp')
%7: bf16[5] = wait_tensor(%6)
%8 = split_with_sizes_copy(%7, [2, 3], 0)
%9: bf16[2] = getitem(%8, 0)
%10: bf16[3] = getitem(%8, 1)
return (%9, %10)
""")


_numels = st.lists(st.integers(1, 40), min_size=1, max_size=6)
_casts = st.sampled_from([None, torch.bfloat16, torch.float64])


@given(_numels, st.integers(2, 4), st.integers(0, 60), _casts)
def test_packing_changes_no_gathered_value(
    numels: list[int], ranks: int, bound: int, cast: torch.dtype | None
) -> None:
    graph = gather_graph(numels, ranks, cast=cast)
    with same_results(graph, ranks):
        pack_gathers(graph, costs=above(bound))
    after = render(graph)
    assert dict(pack_gathers(graph, costs=above(bound)).counts)["gathers_packed_anew"] == 0
    assert render(graph) == after


@given(_numels, st.integers(2, 4), st.integers(0, 60), _casts)
def test_packing_changes_no_reduced_value(
    numels: list[int], ranks: int, bound: int, cast: torch.dtype | None
) -> None:
    graph = reduce_graph(numels, ranks, cast)
    with same_results(graph, ranks):
        pack_reductions(graph, costs=above(bound))


def _names(graph: fx.Graph) -> list[str]:
    return [name_of(node) for node in graph.nodes if is_gather(node) or is_reduction(node)]


def test_collective_has_the_names_of_all_collectives_that_it_replaces() -> None:
    assert _names(gather_graph([2])) == [""]
    for split, joined, pack in (
        (gather_graph([2, 30]), _kept_layers(), pack_gathers),
        (reduce_graph([2, 30]), _two_reductions(), pack_reductions),
    ):
        for graph in (split, joined):
            name_collectives(graph)
        (name,), pair = _names(split), _names(joined)
        pack(split, costs=above(10))
        assert _names(split) == [name, name]
        pack(joined, merge=Merge.ALL, costs=above(1000))
        assert _names(joined) == [", ".join(pair)] and len(pair) == 2
