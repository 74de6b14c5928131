"""Measured costs are rounded, positive and finite."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.tools.calibrate.measure import Link, Measurements, measure, measure_offloads
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks

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


def _offloads(rank: int) -> float:
    return measure_offloads(torch.device("emulated"))


def test_device_with_separate_memory_has_an_offload_bandwidth() -> None:
    (bandwidth,) = run_ranks(1, _offloads, device="emulated")
    assert 0 < bandwidth < math.inf
