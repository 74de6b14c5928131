"""Compiler caches that are broken, shared, or from other passes change no result."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ranks.fresh import run_fresh

_STEP = """
import json, os, sys
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.passes import cache_key
from helpers.ranks.fake_world import fake_world

if "OTHER_PASSES" in os.environ:
    cache_key.hash_sources = lambda: "other sources"
with fake_world(2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    for module in (model[0], model[2], model):
        compile_fsdp.fully_shard(module)
    model.compile(backend="compile_fsdp", fullgraph=True)
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    print(json.dumps([report.cached for report in compile_fsdp.reports()]))
    if "FORK" in os.environ:
        sys.stdout.flush()
        os.dup2(1, 2)  # the child's error is output, too
        child = os.fork()
        again = model(torch.ones(3, 4)).square().mean()
        again.backward()
        assert again.isfinite()
        if child:
            print(os.waitpid(child, 0)[1], flush=True)
        os._exit(0)
"""


def _run(cache: Path, **environment: str) -> tuple[Any, str]:
    """Whether each graph came from the cache; with FORK, the child's exit status, and all output before."""
    # Skip the ten-second g++ check of vector support.
    return run_fresh(_STEP, TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_VEC_ISA_OK="0", **environment)


@pytest.mark.slow
def test_broken_cache_entries_are_recompiled(tmp_path: Path) -> None:
    assert _run(tmp_path) == ([False, False], "")
    assert _run(tmp_path) == ([True, True], "")
    entries = [path for kind in ("fxgraph", "aotautograd") for path in (tmp_path / kind).rglob("*") if path.is_file()]
    assert len(entries) >= 4
    for i, path in enumerate(entries):
        path.write_bytes(b"" if i % 2 else path.read_bytes()[: path.stat().st_size // 2])
    assert _run(tmp_path) == ([False, False], "")


@pytest.mark.slow
def test_cached_graphs_of_other_passes_are_not_loaded(tmp_path: Path) -> None:
    assert _run(tmp_path, OTHER_PASSES="1") == ([False, False], "")
    assert _run(tmp_path) == ([False, False], "")


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        assert all(before == "" for _, before in pool.map(_run, [tmp_path] * 2))
    assert _run(tmp_path) == ([True, True], "")


def test_cache_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=rf"Not a directory.*{tmp_path / 'file'}"):
        _run(tmp_path / "file" / "cache")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_compiled_model_runs_after_fork_except_in_cuda_builds(tmp_path: Path) -> None:
    child, before = _run(tmp_path, FORK="1")
    assert before.startswith("[false, false]")
    if torch.version.cuda is None:
        assert child == 0, before
    else:
        # CUDA builds start autograd's threads in the first backward, also in eager FSDP2; torch refuses the child.
        assert child != 0 and "autograd's threading in combination with fork" in before
