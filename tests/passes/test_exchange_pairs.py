"""Between two gloo ranks collectives become exchanges, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from compile_fsdp.ops import exchange_parts, exchange_shards
from compile_fsdp.passes import Pipeline, exchange_pairs
from compile_fsdp.passes.collectives import GATHER, NAME, REDUCE
from compile_fsdp.passes.remove_unshard_copies import node_name
from graphs import GraphBuilder, aten, c10d
from render import render

EXCHANGES = (exchange_shards, exchange_parts)


@pytest.fixture(autouse=True)
def one_rank_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are rewritten as in one of two gloo ranks whose group is "dp", without the other one."""
    backends = {("dp", "cpu"): "gloo", ("other", "cpu"): "fake"}
    module = importlib.import_module("compile_fsdp.passes.exchange_pairs")
    monkeypatch.setattr(module, "backend_name", lambda name, device: backends.get((name, device)))


def collectives(
    device: str = "cpu", ranks: int = 2, group: str = "dp", reduce_op: str = "avg", numel: int = 4
) -> fx.Graph:
    build = GraphBuilder()
    with build.fake_mode:
        shard = build.input_like("shard", torch.empty(numel, device=device))
        flat = build.input_like("flat", torch.empty(numel * ranks, device=device))
    gathered = build.call(c10d.wait_tensor.default, build.call(GATHER, shard, ranks, group))
    reduced = build.call(c10d.wait_tensor.default, build.call(REDUCE, flat, reduce_op, ranks, group))
    return build.output(build.call(aten.relu.default, gathered), reduced)


def exchanges(graph: fx.Graph) -> int:
    return sum(node.target in EXCHANGES for node in graph.nodes)


def test_between_two_ranks() -> None:
    graph = collectives()
    report = exchange_pairs(graph)
    graph.lint()
    assert dict(report.counts) == {"gathers_by_exchange": 1, "reductions_by_exchange": 1}
    assert_expected_inline(render(graph), """\
shard: f32[4]
flat: f32[8]
%0: f32[8] = exchange_shards(shard, 2, 'dp', '')
%1: f32[8] = wait_tensor(%0)
%2: f32[4] = exchange_parts(flat, 2, 'dp', '')
%3: f32[4] = wait_tensor(%2)
add_own_part_(%3, flat, 'avg', 'dp')
%4: f32[8] = relu(%1)
return (%4, %3)
""")
    before = render(graph)
    exchange_pairs(graph)
    assert render(graph) == before


@pytest.mark.parametrize(
    "kept", [{"device": "meta"}, {"ranks": 4}, {"group": "other"}, {"group": "none"}, {"numel": 0}]
)
def test_elsewhere_nothing_changes(kept: dict[str, object]) -> None:
    graph = collectives(**kept)  # type: ignore[arg-type]
    before = render(graph)
    exchange_pairs(graph)
    assert render(graph) == before


def test_collectives_of_unknown_values_are_left_alone() -> None:
    graph = collectives()
    for node in graph.nodes:
        if node.target in (GATHER, REDUCE):
            del node.meta["val"]
    exchange_pairs(graph)
    assert exchanges(graph) == 0


def test_a_maximum_is_reduced_by_torch() -> None:
    graph = collectives(reduce_op="max")
    exchange_pairs(graph)
    assert exchanges(graph) == 1


def test_a_reduction_that_is_read_before_its_wait_is_left_alone() -> None:
    graph = collectives()
    (launched,) = graph.find_nodes(op="call_function", target=REDUCE)
    with graph.inserting_after(launched):
        graph.call_function(aten.neg.default, (launched,))
    exchange_pairs(graph)
    assert exchanges(graph) == 1


def test_names_stay_with_the_collectives() -> None:
    graph = collectives()
    for node in graph.nodes:
        if node.target in (GATHER, REDUCE):
            node.meta[NAME] = "gather" if node.target is GATHER else "reduction"
    exchange_pairs(graph)
    names = [node.args[-1] for node in graph.nodes if node.target in EXCHANGES]
    assert names == ["gather", "reduction"]


def test_the_pipeline_leaves_it_out_by_name() -> None:
    counts = []
    for disabled in (frozenset[str](), frozenset({"exchange_pairs"})):
        graph = collectives()
        Pipeline(node_name, lambda reports: None, disabled)(graph)
        counts.append(exchanges(graph))
    assert counts == [2, 0]


@pytest.fixture
def fake_group() -> Iterator[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_another_backend_keeps_its_collectives(monkeypatch: pytest.MonkeyPatch, fake_group: str) -> None:
    monkeypatch.undo()
    graph = collectives(group=fake_group)
    exchange_pairs(graph)
    assert exchanges(graph) == 0
