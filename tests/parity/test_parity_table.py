"""The parity table: each FSDP2 feature and each pair of features trains as in eager FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from compile_fsdp.tools.launch import RankError
from helpers.parity.check import Outcome, check_parity, more_collectives
from helpers.parity.features import FEATURES, FOUR_RANKS, SINCE
from helpers.parity.pairs import PAIRS, TOGETHER, cover_pairs
from helpers.parity.table import ParityTable
from helpers.ranks.pools import device_type, run_ranks
from helpers.releases.differences import KEEPS_GROUPS_IN_PART, SUMS_USES_IN_FULL_PRECISION
from helpers.releases.skip import skip_before

# The remaining rows are slow. `make test` covers them in TOGETHER, in PAIRS, or in another test file or example.
QUICK = {
    "expert parallel",
    "group of modules, in part",
    "hsdp and tensor parallel",
    "hsdp, all-reduce later",
    "meshes by parameter",
    "penalty between forwards",
    "prefetch",
    "reshard to 2",
    "tensor parallel, uneven",
}
QUICK_WITH_INDUCTOR = {"bf16, reduced in fp32"}

# Only eager FSDP2 has this race (2.13.0). The all-reduce stream adds an all-reduce hook's output to the accumulated
# gradient and frees it. The next reduce-scatter reuses that memory without waiting for the all-reduce stream.
RACES_IN_EAGER = {"all-reduce hook + buffers + accumulate sharded"}

ROWS = {**FEATURES, **PAIRS, **TOGETHER}


def _train(rank: int, row: str, inner_backend: str) -> Outcome:
    return check_parity(ROWS[row], inner_backend)


def _check(row: str, inner_backend: str, tolerance: float, table: ParityTable | None) -> None:
    names = row.split(" + ")
    skip_before(max(SINCE.get(name, "2.11") for name in names))
    if row in RACES_IN_EAGER and device_type() == "emulated":
        with pytest.raises(RankError, match="race on a tensor without a name: a new allocation"):
            run_ranks(2, _train, row, inner_backend)
        return
    feature = ROWS[row]
    world_size = 2 if FOUR_RANKS.isdisjoint(names) and row not in PAIRS else 4
    outcomes = run_ranks(world_size, _train, row, inner_backend)
    if table is not None:
        table.add(row, inner_backend, world_size, outcomes)
    for outcome in outcomes:
        compiled, eager = outcome.unsharded
        if feature.low_precision and inner_backend == "inductor":
            # Inductor rounds to 16 bits less often than eager, so only compare the errors to unsharded training.
            assert compiled <= 2 * eager
        else:
            assert outcome.worst <= tolerance, outcome.differing
        assert tuple(outcome.directions) == feature.graphs or row in PAIRS
        assert outcome.compiled_after_first_step == feature.later_graphs
        more = more_collectives(*outcome.collectives)
        assert len(more) == (1 if KEEPS_GROUPS_IN_PART and row == "group of modules, in part" else 0), more
        assert compiled <= 1e-5 or feature.low_precision
    sequences = [[(each.kind, each.dtype, each.numel) for each in outcome.collectives[0]] for outcome in outcomes]
    peers = 2 if row == "tensor parallel, uneven" else 1  # only ranks of one data-parallel group have equal shard sizes
    assert all(sequence == sequences[i % peers] for i, sequence in enumerate(sequences))


def _slow_unless(quick: set[str], rows: dict[str, Any]) -> list[Any]:
    return [pytest.param(row, marks=[] if row in quick else [pytest.mark.slow]) for row in rows]


@pytest.mark.parametrize("row", _slow_unless(QUICK, FEATURES))
def test_feature_is_bitwise_equal_to_eager(row: str, parity_table: ParityTable) -> None:
    _check(row, "aot_eager", FEATURES[row].tolerance, parity_table)


@pytest.mark.parametrize("row", _slow_unless(QUICK_WITH_INDUCTOR, FEATURES))
def test_feature_with_inductor_is_equal_to_eager(row: str, parity_table: ParityTable) -> None:
    _check(row, "inductor", 1e-5, parity_table)


@pytest.mark.parametrize("row", _slow_unless(set(list(PAIRS)[12::12]), PAIRS))
def test_pairs_of_features_match_eager(row: str, parity_table: ParityTable) -> None:
    rounds = SUMS_USES_IN_FULL_PRECISION and {"used twice", "bf16", "accumulated"} <= set(row.split(", "))
    _check(row, "aot_eager", 2**-6 if rounds else PAIRS[row].tolerance, parity_table)


@pytest.mark.parametrize("row", TOGETHER)
def test_combined_features_match_eager(row: str) -> None:
    _check(row, "aot_eager", TOGETHER[row].tolerance, None)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3, 4), (5, 5, 5, 5)])
def test_cover_pairs_contains_every_pair_of_values(sizes: tuple[int, ...]) -> None:
    rows = cover_pairs(sizes)
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(sizes[i]), range(sizes[j])))
