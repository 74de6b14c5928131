"""`explain` of a model on the emulated device."""

from __future__ import annotations

import pytest

import compile_fsdp
from helpers.parity.check import build
from helpers.ranks.pools import run_ranks


def _explained(rank: int) -> tuple[list[str], int, list[str], list[bool]]:
    case = build("mlp", compile_fsdp.fully_shard)
    before = [parameter.detach().clone() for parameter in case.model.parameters()]
    report = compile_fsdp.explain(case.model, *case.batch().values())
    unchanged = [bool((a == b).all()) for a, b in zip(case.model.parameters(), before, strict=True)]
    directions = [graph.direction for graph in report.graphs]
    return directions, len(report.breaks), [repr(row) for row in report.groups], unchanged


@pytest.mark.slow
def test_ranks_get_equal_reports_and_parameters_stay_unchanged() -> None:
    first, second = run_ranks(2, _explained, device="emulated")
    assert first == second
    directions, breaks, groups, unchanged = first
    assert (directions, breaks) == (["forward", "backward"], 0)
    assert len(groups) == 3  # two blocks and the root
    assert all(unchanged)
