"""Replicas (HSDP): what is reduced over them, and the option of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp.cli import main
from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning import estimate
from compile_fsdp.wrap import apply, plan
from helpers.models.configs import LLAMA
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type, run_ranks
from helpers.ranks.recording import collectives_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch() -> dict[str, Any]:
    return {"x": torch.zeros(2, 6)}


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def _all_reduces(rank: int) -> list[int]:
    """Bytes of each all-reduce between this rank and the one that has the same shards."""
    mesh = shared_mesh(device_type(), (2, 2), ("replicate", "shard"))
    model = apply(plan(meta_model(), mesh=mesh)).to_empty(device=device_type())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model(**batch()).backward()
    peers = str([rank % 2, rank % 2 + 2])
    found = collectives_of(lambda: model(**batch()).backward())
    return [each.bytes for each in found if "reduce" in each.kind and each.group == peers]


def test_all_reduces_are_those_of_a_step() -> None:
    found = estimate(meta_model(), batch(), replicas=2).at(2)
    for sizes in run_ranks(4, _all_reduces):
        assert len(sizes) == found["reduce_scatters"] == 3
        assert sum(sizes) == found["all_reduced"]  # a ring of two sends half of a buffer twice


def test_replicas_hold_what_one_set_of_ranks_does() -> None:
    one, four = (estimate(meta_model(), batch(), replicas=replicas).at(3) for replicas in (1, 4))
    assert one["all_reduced"] == 0
    assert four["all_reduced"] * 2 == 3 * four["gradients"]  # 2 * (4 - 1) / 4 of them
    assert four | {"all_reduced": 0} == one


def test_the_option_shards_over_a_part_of_the_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(LLAMA))
    options = ["plan", "--hf-config", str(config), "--seq-len", "64", "--json", str(output)]
    found = {}
    for more in (["--world", "8", "--replicate", "2"], ["--world", "4"]):
        assert main([*options, *more]) == 0
        found[more[1]] = json.loads(output.read_text())
        assert ("all_reduced" in capsys.readouterr().out) is ("--replicate" in more)
    assert found["8"]["replicas"] == 2
    assert found["8"]["ranks"]["4"]["peak"] == found["4"]["ranks"]["4"]["peak"]
    assert found["8"]["ranks"]["4"]["all_reduced"] > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--replicate", "3"], "--replicate 3 --world 8,64,512,4096"),
        (["--replicate", "8"], "--replicate 8 --world 8,64,512,4096"),
        (["--replicate", "0"], "parts of at least 2 ranks"),
        (["--replicate", "2", "--network", "x.png"], "neither --memory-budget nor --network with --replicate"),
    ],
)
def test_mistakes_get_one_line(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "8B", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compile-fsdp: error: ") and expected in line


def test_no_replica_is_refused() -> None:
    with pytest.raises(EstimateError, match="replicas=0"):
        estimate(meta_model(), batch(), replicas=0)
