"""Collective costs are measured once, and all ranks use equal costs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import compile_fsdp
from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.reports import reports, reset_reports
from helpers.ranks.pools import device_type, run_ranks

DIM = 16


def _costs(batch: torch.Tensor, costs: str) -> list[Costs | None]:
    """Train a step on a new process group without measured costs; return each graph's costs."""
    group = dist.new_group(list(range(dist.get_world_size())))
    mesh = DeviceMesh.from_group(group, device_type())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).to(batch.device)
    compile_fsdp.fully_shard(model, mesh=mesh)
    model.compile(backend="compile_fsdp", fullgraph=True, options={"costs": costs})
    reset_reports()
    model(batch).sum().backward()
    return [report.costs for report in reports()]


def _train(rank: int, folder: str, costs: str) -> tuple[list[Costs | None], list[Costs | None]]:
    """Return the costs of two steps. Each rank has its own cache; its latencies are raised between the steps."""
    own = Path(folder) / str(rank)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    try:
        batch = torch.randn(100 * (1 + rank), DIM, device=device_type())
        first = _costs(batch, costs)
        for path in own.glob("compile_fsdp/costs/*.json"):
            content = json.loads(path.read_text())
            content["measured"]["gather"]["latency"] = content["measured"]["reduction"]["latency"] = 1.0
            path.write_text(json.dumps(content))
        return first, _costs(batch, costs)
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def test_rank_0_measures_and_caches_the_costs_of_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, _train, str(tmp_path), "measured")
    (first, second), other = found
    assert other == (first, second)
    forward, backward = first
    assert forward is not None
    assert backward == forward
    assert forward.rows == 256  # 200 rows of the larger batch, as a power of two
    assert forward.latency < 0.7
    # The second step reads the cached costs and measures nothing.
    assert second[0] is not None
    assert second[0].latency > 0.7
    assert len(list(tmp_path.glob("0/compile_fsdp/costs/*.json"))) == 1
    assert not list(tmp_path.glob("1/compile_fsdp/costs/*.json"))


def test_constant_costs_are_used_without_measuring(tmp_path: Path) -> None:
    usual = COSTS.get(device_type(), COSTS["cuda"])
    for found in run_ranks(2, _train, str(tmp_path), "constants"):
        for costs in (*found[0], *found[1]):
            assert costs == Costs(usual.latency, usual.comm_bandwidth, usual.memory_bandwidth, usual.flops, rows=256)
    assert not list(tmp_path.glob("*/compile_fsdp"))


def _alone(rank: int) -> list[Costs | None]:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    compile_fsdp.fully_shard(model)
    model.compile(backend="compile_fsdp", fullgraph=True, dynamic=False, options={"inner_backend": "aot_eager"})
    reset_reports()
    for rows in (64, 8 if rank == 0 else 64, 64):
        model(torch.randn(rows, DIM)).sum().backward()
    return [report.costs for report in reports()]


def test_rank_that_recompiles_alone_uses_the_shared_costs() -> None:
    one, other = run_ranks(2, _alone)
    assert len(one) > len(other)
    assert set(one) == set(other)
    assert len(set(one)) == 1


def _other_choices(rank: int) -> list[Costs | None]:
    """Rank 0 asks for measured costs, rank 1 for constants."""
    return _costs(torch.randn(64, DIM, device=device_type()), "constants" if rank else "measured")


def test_all_ranks_use_constants_if_one_rank_does() -> None:
    first, second = run_ranks(2, _other_choices)
    assert first == second
    usual = COSTS.get(device_type(), COSTS["cuda"])
    assert {each.latency for each in first if each is not None} == {usual.latency}
