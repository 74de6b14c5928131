"""Progress messages of rank 0."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.backend import progress
from compile_fsdp.backend.progress import Phase
from helpers.ranks.fake_world import fake_world


def test_long_shown_phases_are_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    long, hidden = Phase("tracing a whale"), Phase("tracing a secret", shown=False)
    time.sleep(0.5)
    for phase in (long, hidden, long):
        phase.end()
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    Phase("tracing an ant").end()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "compile_fsdp: tracing a whale ..."
    assert re.fullmatch(r"compile_fsdp: tracing a whale took \d+ s", last)


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, True), (0, False)])
def test_rank_0_announces_each_compile_phase(
    rank: int, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with fake_world(2, rank):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        compile_fsdp.fully_shard(model)
        options = {"inner_backend": "aot_eager", "progress": shown}
        step = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=options)
        for _ in range(2):
            step(torch.ones(2, 4)).sum().backward()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("...")]
    starts = [line.partition(",")[0] for line in lines]
    phases = ["compiling the forward graph", "waiting for the other ranks' forward graph", "tracing the backward"]
    phases += ["compiling the backward graph", "waiting for the other ranks' backward graph"]
    wanted = [f"compile_fsdp: {phase}" for phase in phases] if rank == 0 and shown else []
    assert [line.removesuffix(" ...") for line in starts] == wanted
