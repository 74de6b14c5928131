"""Compiled training equals torch's eager FSDP2, step by step, and is one forward and one backward graph."""

from __future__ import annotations

from typing import Any

import pytest

from harness import run_ranks
from models import CASES
from parity import Parity, train_both

STEPS = 20
FULLGRAPH = [name for name in CASES if name != "graph_break"]


def _train(rank: int, case: str, inner_backend: str, steps: int, fullgraph: bool) -> Parity:
    return train_both(rank, case, inner_backend, steps, fullgraph)


# On four ranks, which two cores have to share, `make test` trains the cases that differ by the number of ranks.
FOUR_RANKS = {"uneven", "used_three_times", "checkpoint_outside", "transformer_tied"}


def _table(quick_on_four: set[str]) -> list[Any]:
    rows = [(case, world_size) for world_size in (2, 4) for case in FULLGRAPH]
    return [
        pytest.param(*row, marks=[pytest.mark.slow] if row[1] == 4 and row[0] not in quick_on_four else [])
        for row in rows
    ]


@pytest.mark.parametrize(("case", "world_size"), _table(FOUR_RANKS))
def test_aot_eager_is_bitwise_equal(case: str, world_size: int) -> None:
    for result in run_ranks(world_size, _train, case, "aot_eager", STEPS, True):
        assert result.differing == []
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0


@pytest.mark.parametrize(("case", "world_size"), _table({"uneven"}))
def test_inductor_is_equal_within_1e_5(case: str, world_size: int) -> None:
    for result in run_ranks(world_size, _train, case, "inductor", STEPS, True, timeout_s=280.0):
        assert result.worst <= 1e-5, result.differing
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0
        assert result.windows_removed > 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_graph_break_is_bitwise_equal(world_size: int) -> None:
    for result in run_ranks(world_size, _train, "graph_break", "aot_eager", STEPS, False):
        assert result.differing == []
        assert len(result.directions) > 2
        assert result.compiled_after_first_step == 0


def test_graph_break_with_inductor() -> None:
    for result in run_ranks(2, _train, "graph_break", "inductor", STEPS, False, timeout_s=280.0):
        assert result.worst <= 1e-5, result.differing
