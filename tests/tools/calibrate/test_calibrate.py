"""`compile-fsdp calibrate` measures each mesh dim, rounds the costs, and refuses invalid options."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from compile_fsdp.cli import main
from compile_fsdp.options import Options
from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.tools.calibrate.measure import Link, Measurements, measure, measure_offloads
from helpers.ranks.fake_world import fake_world
from helpers.ranks.tests import on_ranks

FOUND = Measurements(Link(300e-6, 0.4e9), Link(420e-6, 0.35e9), copy_bandwidth=17e9, flops=90e9)

numbers = st.floats(1e-9, 1e15)
links = st.builds(Link, numbers, numbers)


@given(st.builds(Measurements, links, links, numbers, numbers, numbers), st.sampled_from(list(COSTS)))
def test_measured_costs_are_built_in_costs_times_powers_of_two(measured: Measurements, device: str) -> None:
    if device == "cpu":
        measured = replace(measured, offload_bandwidth=0.0)
    costs = measured.costs(COSTS[device])
    for found, usual in zip(astuple(costs), astuple(replace(COSTS[device], rows=0)), strict=True):
        assert found == usual == 0 or math.log2(found / usual).is_integer()
    assert costs.memory_bandwidth / measured.copy_bandwidth == pytest.approx(1, abs=0.42)
    assert costs.flops / measured.flops == pytest.approx(1, abs=0.42)


def test_noise_in_measurements_does_not_change_costs() -> None:
    noisy = replace(FOUND, gather=Link(330e-6, 0.44e9), copy_bandwidth=18e9, flops=105e9)
    assert noisy.costs(COSTS["cpu"]) == FOUND.costs(COSTS["cpu"])


def test_link_costs_are_means_of_gathers_and_reductions() -> None:
    costs = Measurements(Link(1.0, 3.0), Link(3.0, 1.0), 1.0, 1.0).costs(Costs(2.0, 1.5, 1.0, 1.0))
    assert (costs.latency, costs.comm_bandwidth) == (2.0, 1.5)


def test_measured_costs_are_positive_and_finite() -> None:
    with fake_world(2):
        found = measure(dist.group.WORLD, torch.device("cpu"), torch.float32)
    costs = found.costs(COSTS["cpu"])
    assert costs.offload_bandwidth == 0  # CPU memory is host memory
    assert min(astuple(replace(costs, offload_bandwidth=1.0, rows=1))) > 0
    assert all(math.isfinite(each) for each in astuple(costs))


@on_ranks(1, "emulated")
def test_device_with_separate_memory_has_an_offload_bandwidth(rank: int) -> None:
    assert 0 < measure_offloads(torch.device("emulated")) < math.inf


def test_every_mesh_dim_is_measured_and_the_file_is_an_option(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert main(["calibrate", "--ranks", "4", "--mesh", "2x2", "--dtype", "float32", "--output", str(path)]) == 0
    printed = capfd.readouterr().out
    for text in ("mesh dim 0, 2 ranks, float32", "mesh dim 1, 2 ranks, float32", "all-gather", "reduce-scatter"):
        assert text in printed
    assert f"costs over dim 1 in {path}" in printed
    assert Options.parse({"costs": str(path)}).costs is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "expected two ranks or more in the last dim, got 1"),
        (["--ranks", "4", "--mesh", "2x3"], "got 2x3 for 4"),
        (["--ranks", "2", "--output", "missing/costs.json"], "expected a file that can be written, got missing/costs"),
    ],
)
def test_single_rank_wrong_mesh_size_or_missing_folder_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert main(["calibrate", "--ranks", "4"]) == 2
    assert "expected at most one rank per GPU of this host, got --ranks 4 for 2" in capsys.readouterr().err


def test_failed_rank_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["calibrate", "--ranks", "2"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("compile-fsdp: error: expected 2 ranks on this host, got a failed rank: ")


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--dtype", "float33"], ["--mesh", "2by2"]])
def test_invalid_dtype_or_mesh_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", *arguments])
