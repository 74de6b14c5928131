"""Faults of passes that `options={"verify": True}` finds; and our passes make none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.errors import VerificationError
from compile_fsdp.passes import Pipeline
from compile_fsdp.passes.check import checking
from compile_fsdp.passes.remove_unshard_copies import node_name
from graphs import GraphBuilder, aten, gather, one_window


def gathered() -> fx.Graph:
    """Two parameters of eight elements, gathered from two ranks in one pack."""
    build = GraphBuilder()
    shards = [build.input(name, (4,)) for name in ("a", "b")]
    return build.output(*(build.call(aten.add.Tensor, rows, 1.0) for rows in gather(build, shards, 2)))


def window() -> fx.Graph:
    return one_window(numel=8, dtype=torch.float32)


def find(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if name in str(node.target))


def read_early(graph: fx.Graph) -> None:
    copy = find(graph, "fsdp.copy_")
    reader = next(user for user in copy.args[0].users if "aten" in str(user.target))
    copy.prepend(reader)


def fill_too_late(graph: fx.Graph) -> None:
    graph.erase_node(find(graph, "fsdp.copy_"))


def gather_from_more_ranks(graph: fx.Graph) -> None:
    collective = find(graph, "all_gather")
    collective.args = (collective.args[0], 4, *collective.args[2:])


def split_otherwise(graph: fx.Graph) -> None:
    split = find(graph, "split_with_sizes")
    split.args = (split.args[0], [2, 6], *split.args[2:])


def use_before_its_definition(graph: fx.Graph) -> None:
    collective = find(graph, "all_gather")
    collective.prepend(find(graph, "wait_tensor"))


@pytest.mark.parametrize(
    ("build", "change", "fault"),
    [
        (window, read_early, "is read while it is not filled"),
        (window, fill_too_late, "is read while it is not filled"),
        (gathered, gather_from_more_ranks, "gives ['float32[32]'], noted is ['float32[16]']"),
        (gathered, split_otherwise, "noted is ['float32[2, 4]', 'float32[2, 4]']"),
        (gathered, use_before_its_definition, "no legal graph"),
    ],
)
def test_fault_is_found(build: Callable[[], fx.Graph], change: Callable[[fx.Graph], None], fault: str) -> None:
    graph = build()
    with pytest.raises(VerificationError) as raised, checking(graph, "careless"):
        change(graph)
    assert "expected careless to make no faults" in str(raised.value)
    assert fault in str(raised.value)


def test_faults_from_before_are_not_the_passs() -> None:
    graph = window()
    read_early(graph)
    with checking(graph, "innocent"):
        find(graph, "fsdp.copy_").name = "renamed"


@pytest.mark.parametrize("build", [gathered, window])
def test_the_pipeline_checks_its_passes(build: Callable[[], fx.Graph]) -> None:
    Pipeline(node_name, lambda reports: None, check=True)(build())
