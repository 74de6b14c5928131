"""Collectives that ranks compare, by process group."""

from __future__ import annotations

import torch

from compile_fsdp.passes.analysis.sequence import CollectiveSequence, read_collectives
from helpers.graphs.build import GraphBuilder


def test_collectives_of_dtensors_count(build: GraphBuilder) -> None:
    x = build.input("x", (4, 4))
    node = build.graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (x, 0, 1, "dp"))
    node.meta["val"] = x.meta["val"]
    assert read_collectives(build.output(node)).groups == ("dp",)


def test_lines_leave_out_other_process_groups_and_renumber_the_rest() -> None:
    calls = (("gather of 3 in {group}", "tp0"), ("gather of 8 in {group}", "dp"), ("sum of 8 in {group}", "world"))
    sequence = CollectiveSequence(calls)
    assert sequence.groups == ("tp0", "dp", "world")
    assert sequence.lines(["dp", "world"]) == ("gather of 8 in group 0", "sum of 8 in group 1")
    assert sequence.lines([]) == ()


def test_earlier_collectives_come_first() -> None:
    first, then = CollectiveSequence((("a", "x"),)), CollectiveSequence((("b", "y"),))
    assert then.after(first).calls == (("a", "x"), ("b", "y"))
