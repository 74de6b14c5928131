"""A restarted process loads both graphs from the caches, on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.ranks.fresh import run_fresh

_STEP = """
import dataclasses, json, sys
import torch
import torch._dynamo.utils

import compile_fsdp
from helpers.models import hybrid
from helpers.ranks.fake_world import fake_world

class Block(hybrid.Block):
    def forward(self, x):
        return x + self.outer(self.inner(x).where(x.new_ones(()) > 0, torch.rand(())))

warm_up, rank = json.loads(sys.argv[1])
with fake_world(4, rank):
    if warm_up:  # torch numbers compiled graphs, and process groups, by how many there were before
        torch.compile(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()
        torch._dynamo.utils.counters.clear()
        for _ in range(3):
            torch.distributed.new_group([0, 1, 2, 3])
    model = hybrid.build_hybrid(Block)
    model.compile(backend="compile_fsdp", fullgraph=True)
    model(torch.ones(3, 4)).square().mean().backward()
    counters = torch._dynamo.utils.counters
    print(json.dumps({
        "counters": {**counters["aot_autograd"], **counters["inductor"]},
        "reports": [dataclasses.asdict(report) for report in compile_fsdp.reports()],
        "captures": counters["compiled_autograd"]["captures"],
    }))
"""


def _run(cache: Path, rank: int, warm_up: bool = False) -> dict[str, Any]:
    """Run a step in a new process; return its counters and reports."""
    result: dict[str, Any]
    # Skip the g++ check of vector support, which takes ten seconds with an empty cache.
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    result, _ = run_fresh(_STEP, warm_up, rank, **variables)
    return result


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Cache folder and result of a first process on rank 0."""
    folder = tmp_path_factory.mktemp("cache")
    cold = _run(folder, rank=0)
    assert [report["cached"] for report in cold["reports"]] == [False, False]
    assert _count(cold, "autograd_cache") == {"miss": 2, "saved": 2}
    assert _count(cold, "fxgraph_cache") == {"miss": 2}
    return folder, cold


def _count(result: dict[str, Any], cache: str) -> dict[str, int]:
    counters: dict[str, int] = result["counters"]
    return {name.removeprefix(f"{cache}_"): count for name, count in counters.items() if name.startswith(f"{cache}_")}


@pytest.mark.parametrize(
    ("rank", "warm_up"),
    [(0, False), (3, False), (0, True)],
    ids=["restart", "other rank", "after other graphs and process groups"],
)
def test_forward_and_backward_come_from_the_cache(cold: tuple[Path, dict[str, Any]], rank: int, warm_up: bool) -> None:
    folder, first = cold
    warm = _run(folder, rank, warm_up)
    assert warm["captures"] == 1
    # The forward loads its graph and AOTAutograd's unused backward; the backward loads one graph.
    assert _count(warm, "autograd_cache") == {"hit": 2}
    assert _count(warm, "fxgraph_cache") == {"hit": 3}
    # Except for `cached`, the reports equal the first process's reports.
    assert warm["reports"] == [report | {"cached": True} for report in first["reports"]]
    assert [report["windows_removed"] for report in warm["reports"]] == [8, 8]
    assert {fqn for fqn, _ in warm["reports"][0]["kept"]} == {"2.weight", "2.bias"}
