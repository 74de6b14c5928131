"""All ranks decide by equal costs, and nothing is measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.options import Options
from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.reports import reports, reset_reports
from helpers.graphs.capture import render_step
from helpers.models.blockwise import shard_blocks
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import device_type, run_ranks

DIM = 16
OWN = Costs(latency=5e-4, comm_bandwidth=1e9, memory_bandwidth=1e10, flops=1e11)


def _train(rank: int, costs: Costs | str | None, batches: tuple[tuple[int, ...], ...]) -> list[Costs | None]:
    """Return each graph's costs after steps with so many rows, by rank."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).to(device_type())
    compile_fsdp.fully_shard(model)
    model.compile(backend="compile_fsdp", fullgraph=True, dynamic=False, options={"costs": costs})
    reset_reports()
    for rows in batches[rank]:
        model(torch.randn(rows, DIM, device=device_type())).sum().backward()
    return [report.costs for report in reports()]


def test_built_in_costs_have_the_rows_of_the_largest_batch() -> None:
    usual = COSTS.get(device_type(), COSTS["cuda"])
    expected = replace(usual, rows=256)  # 200 rows, as a power of two
    assert run_ranks(2, _train, None, ((100,), (200,))) == [[expected, expected]] * 2


def test_rank_that_recompiles_alone_keeps_the_shared_rows() -> None:
    one, other = run_ranks(2, _train, None, ((64, 8, 64), (64, 64, 64)))
    assert len(one) > len(other)
    assert len({*one, *other}) == 1


def test_five_compilations_without_caches_give_equal_graphs() -> None:
    found = []
    for _ in range(5):
        with fake_world(2):
            torch._dynamo.reset()
            model = shard_blocks(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))))
            found.append(render_step(model, lambda model=model: model(torch.ones(8, DIM)).sum()))
    assert found == [found[0]] * 5
    assert any("all_gather" in graph for graph in found[0])


@pytest.mark.parametrize("rows", [0, 32])
def test_costs_from_a_file_keep_their_rows_unless_zero(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(replace(OWN, rows=rows))))
    for found in run_ranks(2, _train, str(path), ((100,), (200,))):
        assert set(found) == {replace(OWN, rows=rows or 256)}


def test_variable_names_a_file_that_the_option_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(OWN)))
    monkeypatch.setenv("COMPILE_FSDP_COSTS", str(path))
    assert Options.parse(None).costs == OWN
    assert Options.parse({"costs": COSTS["cpu"]}).costs == COSTS["cpu"]
    monkeypatch.delenv("COMPILE_FSDP_COSTS")
    assert Options.parse(None).costs is None


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"latency": 1}', json.dumps({**asdict(OWN), "flops": "1"})])
def test_unreadable_file_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UnknownOptionError, match=r"expected costs to be .* compile-fsdp calibrate .*costs\.json"):
        Options.parse({"costs": str(path)})
    monkeypatch.setenv("COMPILE_FSDP_COSTS", str(path))
    with pytest.raises(UnknownOptionError, match="the environment variable COMPILE_FSDP_COSTS"):
        Options.parse(None)
