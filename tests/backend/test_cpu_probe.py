"""Inductor probes a CPU in a thread beside the first trace."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from compile_fsdp.backend import blocks, cpu_probe, inner
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.ranks.fake_world import fake_world
from helpers.releases.skip import skip_before


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """For each probe, whether it ran in the main thread, and how many graphs Dynamo had compiled when it began."""
    found: list[tuple[bool, int]] = []
    torch._dynamo.utils.counters.clear()

    def probe() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        found.append((is_main, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_probe, "pick_vec_isa", SimpleNamespace(value=probe))
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "compile_fsdp CPU probe":
            thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    return found


def _step(layers: int = 1, **options: Any) -> None:
    with fake_world(2):
        model = compile_whole(shard_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))), **options)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()


def test_probe_runs_once_in_a_thread_before_the_trace_and_its_error_stays_there(
    probes: list[tuple[bool, int]], tmp_path: Path
) -> None:
    skip_before("2.13")
    path = str(tmp_path / "bundle")
    _step(bundle=path)
    assert probes == [(False, 0)]
    _step(bundle=path)  # traces nothing
    assert probes == [(False, 0)]


@pytest.mark.parametrize("layers", [1, 2])  # two equal blocks are compiled once, before the graph
def test_compilation_waits_for_the_probe(layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skip_before("2.13")
    is_waiting, running = threading.Event(), []

    def probe() -> None:
        is_waiting.wait(60)
        time.sleep(0.1)
        running.append("probe")

    def wait() -> None:
        is_waiting.set()
        cpu_probe.await_cpu_probe()
        running.append("compiler")

    monkeypatch.setattr(cpu_probe, "pick_vec_isa", SimpleNamespace(value=probe))
    for module in (blocks, inner):
        monkeypatch.setattr(module, "await_cpu_probe", wait)
    _step(layers, bundle=str(tmp_path / "bundle"))
    assert running[:2] == ["probe", "compiler"]


def test_no_probe_without_inductor(probes: list[tuple[bool, int]]) -> None:
    _step(inner_backend="aot_eager")
    assert probes == []


def test_no_probe_for_a_gpu(probes: list[tuple[bool, int]]) -> None:
    cpu_probe.start_cpu_probe(torch.device("cuda"))
    assert probes == []
