"""Compiler caches: a restarted process of any rank loads both graphs, and no broken entry or graph of other passes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ranks.fresh import run_fresh

_STEP = """
import dataclasses, json, os, sys
import torch
import torch._dynamo.utils

import compile_fsdp
from compile_fsdp.passes import cache_key
from helpers.models import hybrid
from helpers.ranks.fake_world import fake_world

class Block(hybrid.Block):
    def forward(self, x):
        return x + self.outer(self.inner(x).where(x.new_ones(()) > 0, torch.rand(())))

def step():
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    return loss

rank, warm_up = json.loads(sys.argv[1])
if "OTHER_PASSES" in os.environ:
    cache_key.hash_sources = lambda: "other sources"
with fake_world(4, rank):
    if warm_up:  # torch numbers compiled graphs, and process groups, by how many there were before
        torch.compile(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()
        torch._dynamo.utils.counters.clear()
        for _ in range(3):
            torch.distributed.new_group([0, 1, 2, 3])
    model = hybrid.build_hybrid(Block)
    model.compile(backend="compile_fsdp", fullgraph=True)
    step()
    counters = torch._dynamo.utils.counters
    print(json.dumps({
        "counters": {**counters["aot_autograd"], **counters["inductor"]},
        "reports": [dataclasses.asdict(report) for report in compile_fsdp.reports()],
        "captures": counters["compiled_autograd"]["captures"],
    }))
    if "FORK" in os.environ:
        sys.stdout.flush()
        os.dup2(1, 2)  # the child's error is output, too
        child = os.fork()
        assert step().isfinite()
        if child:
            print(os.waitpid(child, 0)[1], flush=True)
        os._exit(0)
"""


def _run(cache: Path, rank: int = 0, warm_up: bool = False, **environment: str) -> tuple[Any, str]:
    """Run a step in a new process; return its counters and reports, with FORK a child's status, and earlier output."""
    # Skip the g++ check of vector support, which takes ten seconds with an empty cache.
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "0", **environment}
    return run_fresh(_STEP, rank, warm_up, **variables)


def _cached(result: dict[str, Any]) -> list[bool]:
    return [report["cached"] for report in result["reports"]]


def _cached_after(cache: Path, **environment: str) -> list[bool]:
    """Whether each graph came from the cache, in a process that prints nothing else."""
    result, before = _run(cache, **environment)
    assert before == ""
    return _cached(result)


def _count(result: dict[str, Any], cache: str) -> dict[str, int]:
    counters: dict[str, int] = result["counters"]
    return {name.removeprefix(f"{cache}_"): count for name, count in counters.items() if name.startswith(f"{cache}_")}


def test_forward_and_backward_come_from_the_cache(tmp_path: Path) -> None:
    """Those of a process on rank 0, in one on another rank and after other graphs and process groups."""
    child, output = _run(tmp_path, FORK="1")
    first = json.loads(output.splitlines()[0])
    assert _cached(first) == [False, False]
    assert _count(first, "autograd_cache") == {"miss": 2, "saved": 2}
    assert _count(first, "fxgraph_cache") == {"miss": 2}
    if torch.version.cuda is None:
        assert child == 0, output  # a compiled model runs after a fork
    else:
        # CUDA builds start autograd's threads in the first backward, also in eager FSDP2; torch refuses the child.
        assert child != 0 and "autograd's threading in combination with fork" in output

    warm, _ = _run(tmp_path, rank=3, warm_up=True)
    assert warm["captures"] == 1
    # The forward loads its graph and AOTAutograd's unused backward; the backward loads one graph.
    assert _count(warm, "autograd_cache") == {"hit": 2}
    assert _count(warm, "fxgraph_cache") == {"hit": 3}
    # Except for `cached`, the reports equal the first process's reports.
    assert warm["reports"] == [report | {"cached": True} for report in first["reports"]]
    assert [report["windows_removed"] for report in warm["reports"]] == [8, 8]
    assert {fqn for fqn, _ in warm["reports"][0]["kept"]} == {"2.weight", "2.bias"}


@pytest.mark.slow
def test_broken_cache_entries_are_recompiled(tmp_path: Path) -> None:
    assert _cached_after(tmp_path) == [False, False]
    assert _cached_after(tmp_path) == [True, True]
    entries = [path for kind in ("fxgraph", "aotautograd") for path in (tmp_path / kind).rglob("*") if path.is_file()]
    assert len(entries) >= 4
    for i, path in enumerate(entries):
        path.write_bytes(b"" if i % 2 else path.read_bytes()[: path.stat().st_size // 2])
    assert _cached_after(tmp_path) == [False, False]


@pytest.mark.slow
def test_cached_graphs_of_other_passes_are_not_loaded(tmp_path: Path) -> None:
    assert _cached_after(tmp_path, OTHER_PASSES="1") == [False, False]
    assert _cached_after(tmp_path) == [False, False]


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(_cached_after, [tmp_path] * 2))
    assert _cached_after(tmp_path) == [True, True]


def test_cache_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=rf"Not a directory.*{tmp_path / 'file'}"):
        _run(tmp_path / "file" / "cache")
