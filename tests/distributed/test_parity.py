"""Compiled training equals eager FSDP2 in each step, with one forward and one backward graph."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.graphs.caches import without_graph_caches
from helpers.parity.check import Parity, train_both
from helpers.ranks.pools import run_ranks
from helpers.releases.differences import AOT_ROUNDS_OTHERWISE, CUTS_FEWER_PIECES

STEPS = 20
# Cases that train for long. test_features.py trains the remaining cases for a few steps.
FULLGRAPH = [
    "mlp",
    "nested",
    "used_twice",
    "used_three_times",
    "transformer",
    "transformer_tied",
    "llama",
    "gpt2",
    "checkpoint_inside",
    "checkpoint_outside",
    "frozen",
    "uneven",
    "unused_parameter",
]


def _train(rank: int, case: str, inner_backend: str, steps: int, fullgraph: bool) -> Parity:
    with without_graph_caches():
        return train_both(rank, case, inner_backend, steps, fullgraph)


# Only `make test-all` runs rows that another row covers, above all rows on four ranks, which two cores have to share.
# tests/examples/test_train.py trains transformers with Inductor.
AOT_EAGER_ON_TWO = {"nested", "llama"}
INDUCTOR_ON_TWO = {"uneven"}


def _table(quick: set[tuple[str, int]]) -> list[Any]:
    rows = [(case, world_size) for world_size in (2, 4) for case in FULLGRAPH]
    return [pytest.param(*row, marks=[] if row in quick else [pytest.mark.slow]) for row in rows]


AOT_EAGER = _table({(case, 2) for case in AOT_EAGER_ON_TWO})
INDUCTOR = _table({(case, 2) for case in INDUCTOR_ON_TWO})


@pytest.mark.parametrize(("case", "world_size"), AOT_EAGER)
def test_aot_eager_is_bitwise_equal(case: str, world_size: int) -> None:
    for result in run_ranks(world_size, _train, case, "aot_eager", STEPS, True):
        assert result.worst <= (1e-6 if AOT_ROUNDS_OTHERWISE and case == "llama" else 0.0), result.differing
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0


@pytest.mark.parametrize(("case", "world_size"), INDUCTOR)
def test_inductor_is_equal_within_1e_5(case: str, world_size: int) -> None:
    for result in run_ranks(world_size, _train, case, "inductor", STEPS, True, timeout_s=280.0):
        assert result.worst <= 1e-5, result.differing
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0
        assert result.windows_removed > 0


# Slow, because test_programs.py also covers graph breaks.
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_graph_break_is_bitwise_equal(world_size: int) -> None:
    for result in run_ranks(world_size, _train, "graph_break", "aot_eager", STEPS, False):
        assert result.differing == []
        assert len(result.directions) > 2
        assert result.compiled_after_first_step == 0


@pytest.mark.slow
def test_graph_breaks_in_more_modules_than_dynamos_recompile_limit() -> None:
    for result in run_ranks(2, _train, "graph_breaks", "aot_eager", 3, False, timeout_s=280.0):
        assert result.differing == []
        assert result.directions.count("backward") >= (9 if CUTS_FEWER_PIECES else 10)
        assert result.compiled_after_first_step == 0


@pytest.mark.slow
def test_graph_break_with_inductor_is_equal_within_1e_5() -> None:
    for result in run_ranks(2, _train, "graph_break", "inductor", STEPS, False, timeout_s=280.0):
        assert result.worst <= 1e-5, result.differing
