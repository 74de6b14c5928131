"""Twenty steps of nested models and language models equal eager FSDP2, without recompilation."""

from __future__ import annotations

import itertools

import pytest

import compile_fsdp
from helpers.graphs.capture import without_graph_caches
from helpers.parity.check import LEARNING_RATE, Parity
from helpers.parity.twins import Twins
from helpers.ranks.pools import run_ranks
from helpers.releases.differences import AOT_ROUNDS_OTHERWISE, CUTS_FEWER_PIECES

STEPS = 20


def _train(rank: int, case: str, inner_backend: str, fullgraph: bool = True) -> Parity:
    with without_graph_caches():
        twins = Twins(rank, case, LEARNING_RATE, fullgraph=fullgraph, options={"inner_backend": inner_backend})
        twins.train()
        graphs = len(compile_fsdp.reports())
        for _ in range(STEPS - 1):
            twins.train()
    reports = compile_fsdp.reports()
    twins.result.directions = [report.direction for report in reports]
    twins.result.compiled_after_first_step = len(reports) - graphs
    twins.result.windows_removed = sum(report.windows_removed for report in reports)
    return twins.result


# (case, inner backend, number of ranks). parity/test_parity_table.py trains the remaining cases for three steps.
QUICK = [("nested", "aot_eager", 2), ("llama", "aot_eager", 2), ("uneven", "inductor", 2)]
SLOW = [
    *itertools.product(("transformer", "transformer_tied", "gpt2"), ("aot_eager", "inductor"), (2,)),
    *(("nested", "inductor", 2), ("llama", "inductor", 2), ("llama", "aot_eager", 4), ("uneven", "inductor", 4)),
]


@pytest.mark.parametrize(
    ("case", "inner_backend", "world_size"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_twenty_steps_equal_eager_with_two_graphs(case: str, inner_backend: str, world_size: int) -> None:
    is_exact = inner_backend == "aot_eager"
    tolerance = (1e-6 if AOT_ROUNDS_OTHERWISE and case == "llama" else 0.0) if is_exact else 1e-5
    for result in run_ranks(world_size, _train, case, inner_backend):
        assert result.worst <= tolerance, result.differing
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0
        assert (result.windows_removed > 0) is not is_exact


# Slow, because test_random_programs.py also covers graph breaks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "inner_backend", "pieces"),
    [("graph_break", "inductor", 2), ("graph_breaks", "aot_eager", 9 if CUTS_FEWER_PIECES else 10)],
)
def test_twenty_steps_with_graph_breaks_equal_eager(case: str, inner_backend: str, pieces: int) -> None:
    """The second model breaks in more modules than Dynamo's recompile limit."""
    for result in run_ranks(2, _train, case, inner_backend, False):
        assert result.worst <= (0.0 if inner_backend == "aot_eager" else 1e-5), result.differing
        assert result.directions.count("backward") >= pieces
        assert result.compiled_after_first_step == 0
