"""Detection of ranks that run agreed graphs in different orders."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.backend import graph_order
from compile_fsdp.backend.graph_order import GraphOrder, Prediction, note_runs
from helpers.ranks.forked import TESTS, start_ranks
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks

PARTING = TESTS / "helpers" / "faults" / "parting_ranks.py"


def _unpredicted(graphs: list[str]) -> int:
    prediction = Prediction()
    return sum(not prediction.add(graph) for graph in graphs)


@given(step=st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
@settings(max_examples=200)
def test_repeated_step_is_predicted_after_eight_repetitions(step: list[str]) -> None:
    assert _unpredicted(step * 30) == _unpredicted(step * 8)


def test_accumulation_over_many_microbatches_is_predicted() -> None:
    step = ["forward", "backward"] * 100 + ["forward", "last backward"]
    assert _unpredicted(step * 10) == _unpredicted(step * 3) < 10


@given(graphs=st.lists(st.sampled_from("abc"), max_size=200))
def test_notes_reconstruct_the_graph_sequence(graphs: list[str]) -> None:
    writer, reader, notes = Prediction(), Prediction(), {}
    for at, graph in enumerate(graphs):
        if not writer.add(graph):
            notes[at] = graph
    read = []
    for at in range(len(graphs)):
        read.append(notes.get(at, reader.next))
        reader.add(str(read[-1]))
    assert read == graphs


def _part(rank: int) -> tuple[str | None, str | None, int]:
    """Run an extra forward graph on rank 1 before the fifth step."""
    order = GraphOrder(dist.new_group())
    gather = "all_gather of float32[8] in group 0 for "
    forward = order.know("forward graph", [f"{gather}layers.0", f"{gather}layers.1"])
    backward = order.know("backward graph", [f"{gather}layers.1", "reduce_scatter of float32[8] in group 0"])
    notes = 0
    for step in range(5):
        if step == 4 and rank == 1:
            order.begin(forward)
        notes = len(order._notes)
        order.begin(forward)
        order.begin(backward)
    dist.barrier()
    said: list[str] = []
    with mock.patch.object(graph_order._log, "error", lambda text, *args: said.append(text % args)):
        for _ in range(3):
            order.look()
    return order.difference(only_certain=False), said[0] if said else None, notes


def test_difference_names_the_graph_that_each_rank_begins() -> None:
    (first, first_said, notes), (second, second_said, _) = run_ranks(2, _part)
    assert notes == 3  # notes stop when the first period is known
    assert first is not None and second is not None and first_said is not None
    assert "as number 10 of their process group, rank 0 begins a backward graph of 2 collectives" in first
    assert "and rank 1 a forward graph of 2;" in first
    assert "at position 0: on rank 0 all_gather of float32[8] in group 0 for layers.1; on rank 1" in first
    assert first_said.endswith(first)
    # Rank 0 has written no new note, so it may also be late or dead.
    assert "rank 0 a backward graph of 2, if it has come so far" in second
    assert second_said is None


@on_ranks(2)
def test_late_rank_is_not_reported_as_different(rank: int) -> None:
    order = GraphOrder(dist.new_group())
    graphs = [order.know("forward graph", [name]) for name in "ab"]
    for graph in graphs * 3 + graphs[:1] * (1 - rank):
        order.begin(graph)
    dist.barrier()
    assert order.difference(only_certain=False) is None and order._is_followed


@on_ranks(2)
def test_program_without_a_period_is_followed_for_256_notes_only(rank: int) -> None:
    order, numbers = GraphOrder(dist.new_group()), random.Random(0)
    graphs = [order.know("forward graph", [str(i)]) for i in range(40)]
    for _ in range(2000):
        order.begin(numbers.choice(graphs))
    order.begin(graphs[rank])
    dist.barrier()
    assert len(order._notes) == 256
    assert order.difference(only_certain=False) is None


@on_ranks(2)
def test_error_of_an_op_is_not_replaced(rank: int) -> None:
    """Each rank runs a different graph, whose op fails."""
    order = GraphOrder(dist.new_group())
    graphs = [order.know("forward graph", [name]) for name in "ab"]
    for graph in graphs * 3:
        order.begin(graph)

    def fail() -> None:
        raise RuntimeError("out of range")

    with pytest.raises(RuntimeError, match=r"^out of range$") as error:
        note_runs(fail, [(order, graphs[rank])])()
    assert error.type is RuntimeError


def test_error_of_failed_collective_names_ranks_and_graphs(tmp_path: Path) -> None:
    """gloo ends the process that receives too much data; the other rank loses its connection."""
    ranks = start_ranks(tmp_path, [PARTING])
    (code, output), (other_code, _) = [rank.wait(120.0) for rank in ranks]
    assert code > 0 and other_code != 0
    gather = "float32[72] in group 0 for FSDP::all_gather (0)"
    for part in ("RanksPartedError", "rank 0 begins a forward graph", gather, "rank 1 a forward graph"):
        assert part in output, output
