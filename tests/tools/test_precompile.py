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
from helpers.models.replays import count_replays
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before

_SCRIPT = """
import sys

import torch
import torch.distributed as dist

from test_precompile import build

if not dist.is_initialized():
    dist.init_process_group("gloo")
options = {"bundle": sys.argv[1]} if len(sys.argv) > 1 else {}
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


def _train(rank: int, bundle: str | None) -> tuple[tuple[int, int], int, list[torch.Tensor]]:
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    model = build() if bundle is None else build(bundle=bundle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    replays = (0, 0) if bundle is None else count_replays(model)
    parameters: list[Any] = list(model.parameters())
    return replays, counters["unique_graphs"] - before, [each.full_tensor().detach() for each in parameters]


def test_ranks_replay_a_precompiled_bundle(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = script.parent / "made" / "today"
    command = ["precompile", "--world", "2", "--out", str(folder), str(script), "elsewhere/step.bundle"]
    path = folder / "step.bundle"
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {path}"
    content = path.read_bytes()
    plain = run_ranks(2, _train, None)
    for (replays, graphs, parameters), (_, traced, expected) in zip(
        run_ranks(2, _train, str(path)), plain, strict=True
    ):
        assert (replays, graphs, traced) == ((2, 2), 0, 2)
        assert all(map(torch.equal, parameters, expected))
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"kept, since it fits: {path}"
    assert path.read_bytes() == content
    assert not Path("elsewhere").exists()


def test_script_without_bundle_is_an_error(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = script.parent / "made"
    assert main(["precompile", "--world", "2", "--out", str(folder), str(script)]) == 2
    assert "expected a step of a model" in capsys.readouterr().err.splitlines()[-1]
    assert not folder.exists()


def test_precompile_under_torchrun_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["precompile", "--world", "2", "--out", str(script.parent), str(script)]) == 2
    assert "run the command without it" in capsys.readouterr().err
