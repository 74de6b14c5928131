"""`compile-fsdp precompile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn

import compile_fsdp
from compile_fsdp.cli import main
from compile_fsdp.replay import bundle
from helpers.models.replays import count_replays
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before

_SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

from test_precompile import build

print("rank", *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
if not dist.is_initialized():
    dist.init_process_group("gloo")
options = {"bundle": sys.argv[1] or False} if len(sys.argv) > 1 else {}
build(**options)(torch.ones(3, 4)).square().mean().backward()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    skip_before("2.13")
    torch._dynamo.reset()
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT.replace("test_precompile", __name__))
    return path


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for module in (model[0], model):
        compile_fsdp.fully_shard(module)
    model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    return model


def _train(rank: int, folder: str, asked: str | bool | None) -> tuple[tuple[int, int], int, list[torch.Tensor]]:
    bundle.own_folder = lambda: Path(folder)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    model = build(bundle=asked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    replays = (0, 0) if asked is False else count_replays(model)
    parameters: list[Any] = list(model.parameters())
    return replays, counters["unique_graphs"] - before, [each.full_tensor().detach() for each in parameters]


@pytest.mark.parametrize(("asked", "rank"), [("step.bundle", 0), (None, 1)])
def test_ranks_replay_a_precompiled_bundle(
    script: Path, capsys: pytest.CaptureFixture[str], asked: str | None, rank: int
) -> None:
    folder = script.parent / "made" / "today"
    arguments = [f"elsewhere/{asked}"] if asked else []
    command = ["precompile", "--world", "2", "--rank", str(rank), "--out", str(folder), str(script), *arguments]
    assert main(command) == 0
    (path,) = folder.iterdir()
    assert asked in (None, path.name)
    assert capsys.readouterr().out.splitlines() == [f"rank {rank} {rank} {rank + 1}", f"wrote {path}"]
    content = path.read_bytes()
    plain = run_ranks(2, _train, "", False)
    for (replays, graphs, parameters), (_, traced, expected) in zip(
        run_ranks(2, _train, str(folder), str(path) if asked else None), plain, strict=True
    ):
        assert (replays, graphs, traced) == ((2, 2), 0, 2)
        assert all(map(torch.equal, parameters, expected))
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"kept, since it fits: {path}"
    assert path.read_bytes() == content
    assert not Path("elsewhere").exists()


def test_script_whose_models_have_no_bundles_is_an_error(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = script.parent / "made"
    assert main(["precompile", "--world", "2", "--out", str(folder), str(script), ""]) == 2
    assert "expected a step that a bundle can hold" in capsys.readouterr().err.splitlines()[-1]
    assert not folder.exists()


def test_precompile_under_torchrun_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["precompile", "--world", "2", "--out", str(script.parent), str(script)]) == 2
    assert "run the command without it" in capsys.readouterr().err
