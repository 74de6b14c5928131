"""Offloads: only results that the link has time for, and that take longer to recompute."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes.budget.choose import find_choices, find_offloads, fit
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Choices, Sharding
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.passes.dynamo.fit_memory_budget import fit_memory_budget
from compile_fsdp.torch_compat.dynamo import least_offloaded_bytes, request_offload
from helpers.graphs.blocks import COSTS, DIM, RANKS, UNLIMITED, blocks
from helpers.graphs.build import GraphBuilder

# A product of 256 rows takes a millisecond. So does the transfer of the larger result, 64 KiB.
ROWS = 256
OVER_LINK = replace(COSTS, latency=1e-9, offload_bandwidth=2.0**26)


def timeline(bandwidth: float = OVER_LINK.offload_bandwidth, rows: int = ROWS, count: int = 6) -> Timeline:
    graph, parameters = blocks(rows, count)
    return Timeline(read_step(graph, parameters), RANKS, replace(OVER_LINK, offload_bandwidth=bandwidth))


def offered(step: Timeline) -> dict[int, float]:
    return find_offloads(step, {choice.op: choice.seconds for choice in find_choices(step) if choice.op >= 0})


def test_nothing_is_offloaded_without_a_link_or_a_need() -> None:
    assert not fit(timeline(), UNLIMITED).choices.offloaded
    assert offered(timeline(bandwidth=0.0)) == {}
    assert not fit(timeline(bandwidth=0.0), 0).choices.offloaded


@given(st.floats(1e6, 1e12), st.integers(1, 512))
def test_transfers_do_not_overlap_and_end_before_the_backward(bandwidth: float, rows: int) -> None:
    step = timeline(bandwidth, rows)
    busy = []
    for at in offered(step):
        size = sum(value.size for value in step.step.made[at] if value.is_saved)
        assert size >= step.least_offloaded_bytes
        assert not any(value.is_result for value in step.step.made[at])
        busy.append((step.leaves_at(at), step.leaves_at(at) + size / bandwidth))
    ordered = sorted(busy)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    assert all(end <= step.forward_seconds for _, end in ordered)


def test_results_that_take_longest_to_recompute_are_offloaded_first() -> None:
    """The link has no time for all results: it takes the products, and not gelu."""
    step = timeline()
    targets = {step.step.ops[at].target for at in offered(step)}
    assert F.linear in targets
    assert F.gelu not in targets


def test_fast_link_offloads_products_instead_of_recomputing_them() -> None:
    step = timeline(bandwidth=1e12)
    choices = [choice for choice in find_choices(step) if choice.op >= 0]
    products = [choice for choice in choices if step.step.ops[choice.op].target is F.linear]
    assert products
    assert all(choice.is_offload and choice.name.startswith("offload linear") for choice in products)


def test_small_results_are_not_offloaded() -> None:
    rows = 4
    size = rows * 4 * DIM * 4
    bandwidth = size / OVER_LINK.latency
    assert offered(timeline(bandwidth, rows))
    assert not offered(timeline(bandwidth * 1.01, rows))


def test_results_of_the_graph_are_not_offloaded() -> None:
    graph, parameters = blocks(ROWS, 6)
    hidden = next(node for node in graph.nodes if node.target is F.linear)
    output = graph.output_node()
    output.args = ((*output.args[0], hidden),)
    step = Timeline(read_step(graph, parameters), RANKS, OVER_LINK)
    at = step.step.ops.index(hidden)
    assert at in offered(timeline())
    assert at not in offered(step)


def test_offloading_lowers_the_smallest_peak() -> None:
    smallest = [fit(timeline(bandwidth), 0) for bandwidth in (0.0, OVER_LINK.offload_bandwidth)]
    assert smallest[1].choices.offloaded
    assert smallest[1].peak < 0.9 * smallest[0].peak


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), st.floats(1e6, 1e12))
def test_more_budget_is_never_slower_and_never_exceeded(budgets: list[int], bandwidth: float) -> None:
    step = timeline(bandwidth)
    smallest = fit(step, 0).peak
    less, more = (fit(step, smallest + budget) for budget in sorted(budgets))
    assert more.peak <= smallest + max(budgets)
    assert less.peak <= smallest + min(budgets)
    assert set(more.made) <= set(less.made)
    assert not (less.choices.offloaded & less.choices.recomputed)


def test_offloaded_result_is_held_until_the_next_offload_and_from_its_fetch() -> None:
    step = timeline(bandwidth=1e12, count=3)
    linears = [at for at, op in enumerate(step.step.ops) if op.target is F.linear and step.step.made[at][0].is_saved]
    first, second = linears[:2]
    size = step.step.made[first][0].size
    kept = step.held(Choices())
    one, both = (step.held(Choices(offloaded=set(linears[:count]))) for count in (1, 2))
    ops = len(step.step.ops)
    middle = range(second + 2, 2 * ops - second - 3)
    assert {kept[place] - one[place] for place in middle} == {size}
    # With a second offload, the first result is held until the last use of the second, at `second + 1`.
    gone = [place for place in range(ops) if kept[place] - both[place] >= size]
    assert gone[0] == second + 2
    assert kept[2 * ops - 1 - first] == one[2 * ops - 1 - first]


def test_a_slow_link_fetches_earlier() -> None:
    def fetched_at(bandwidth: float) -> int:
        step = timeline(bandwidth, count=3)
        at = next(at for at, op in enumerate(step.step.ops) if op.target is F.linear)
        kept, away = step.held(Choices()), step.held(Choices(offloaded={at}))
        return max(place for place in range(len(kept)) if kept[place] != away[place])

    assert fetched_at(2.0**25) < fetched_at(1e12)


def test_offloaded_input_is_fetched_before_its_reader_runs_again() -> None:
    """gelu's input is fetched before gelu runs again, which is before its own backward."""
    step = timeline(bandwidth=1e12, count=1)
    linear, gelu = 0, 1
    assert [op.target for op in step.step.ops[:2]] == [F.linear, F.gelu]
    away, again = (step.held(Choices(offloaded={linear}, recomputed=chosen)) for chosen in (set(), {gelu}))
    before = 2 * len(step.step.ops) - 1 - 2 - 1  # the backward of the product that reads gelu's result comes next
    # At this place `away` holds gelu's saved result, and `again` its input, which is as large.
    assert step.step.made[gelu][0].size == step.step.made[linear][0].size
    assert again[before] == away[before]


def marked(costs_bandwidth: float) -> tuple[fx.Graph, dict[fx.Node, Sharding], int]:
    graph, parameters = blocks(ROWS, 6)
    costs = replace(OVER_LINK, offload_bandwidth=costs_bandwidth)
    smallest = fit(Timeline(read_step(graph, parameters), RANKS, costs), 0).peak
    decision = fit_memory_budget(graph, parameters, RANKS, int(smallest * 1.1), costs, lambda possible: possible[0])
    return graph, parameters, len(decision.offloaded)


def test_ops_to_offload_are_marked_with_the_least_bytes_to_offload() -> None:
    graph, _, offloaded = marked(OVER_LINK.offload_bandwidth)
    found = [node for node in graph.nodes if least_offloaded_bytes(node) is not None]
    assert 0 < offloaded == len(found)
    assert {least_offloaded_bytes(node) for node in found} == {int(OVER_LINK.latency * OVER_LINK.offload_bandwidth)}
    graph, _, offloaded = marked(0.0)
    assert offloaded == 0
    assert all(least_offloaded_bytes(node) is None for node in graph.nodes)


def test_request_to_offload_keeps_the_users_annotations() -> None:
    build = GraphBuilder(meta_key="example_value")
    node = build.call(torch.neg, build.input("x", (2,)))
    node.meta["custom"] = annotated = {"mine": 1}
    request_offload(node, 5)
    assert node.meta["custom"]["mine"] == 1
    assert annotated == {"mine": 1}
    assert least_offloaded_bytes(node) == 5
