"""How long a step takes on two levels of network."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_fsdp.passes import Costs
from compile_fsdp.tools.planning.network import Network, step_time

COSTS = Costs(latency=1.0, comm_bandwidth=10.0, memory_bandwidth=1.0, flops=1.0)
NETWORK = Network(COSTS, ranks_per_host=4, host_bandwidth=5.0)


def step(ranks: int, *groups: tuple[float, int], freed: bool = True) -> Any:
    """A step whose groups have (seconds of the forward, bytes): one op and one parameter each."""
    made = []
    for number, (_, size) in enumerate(groups):
        sharding = SimpleNamespace(reduced_bytes=size)
        parameter = SimpleNamespace(size=size, sharding=sharding, needs_grad=True)
        frees = [None] if freed else []
        made.append(SimpleNamespace(number=number, uses=[number], parameters=[parameter], size=size, frees=frees))
    seconds = [each for each, _ in groups]
    return SimpleNamespace(
        step=SimpleNamespace(groups=made), ranks=ranks, seconds=seconds, backward_seconds=[2 * each for each in seconds]
    )


def test_within_a_host_its_own_costs_count() -> None:
    assert NETWORK.shard_collective(30, 4) == COSTS.collective(30, 4)


def test_across_hosts_the_slower_link_counts_and_the_depth_of_their_tree() -> None:
    # 16 ranks are 4 hosts: a tree of depth 2.
    assert NETWORK.shard_collective(30, 16) == pytest.approx(1.0 * 3 + 30 * 15 / 5.0)


def test_replicas_are_reduced_by_rings_through_the_hosts() -> None:
    assert NETWORK.replica_collective(30, 1) == 0
    assert NETWORK.replica_collective(30, 2) == pytest.approx(2.0 + 2 * 1 / 2 * 30 * 4 / 5.0)


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    found = step_time(step(2, (100.0, 40), (100.0, 40)), NETWORK)
    collective = COSTS.collective(20, 2)
    assert found.compute == 600
    # The forward's first, the backward's first and the last reduction; all others are hidden.
    assert found.exposed == pytest.approx(3 * collective)


def test_what_is_kept_is_not_gathered_again() -> None:
    again = step_time(step(2, (100.0, 40), (100.0, 40)), NETWORK)
    collective = COSTS.collective(20, 2)
    for freed, kept in ((True, {0, 1}), (False, ())):
        timeline = step(2, (100.0, 40), (100.0, 40), freed=freed)
        assert step_time(timeline, NETWORK, kept=kept).exposed == pytest.approx(again.exposed - collective)


def test_without_compute_all_of_it_is_exposed() -> None:
    found = step_time(step(2, (0.0, 40), (0.0, 40)), NETWORK)
    assert found.compute == 0
    assert found.exposed == pytest.approx(6 * COSTS.collective(20, 2))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**4).map(lambda size: 64 * size)), min_size=1, max_size=5),
    st.sampled_from([2, 4]),
)
def test_more_replicas_are_never_faster(groups: list[tuple[float, int]], shards: int) -> None:
    times = [step_time(step(shards, *groups), NETWORK, replicas).exposed for replicas in (1, 2, 8, 64)]
    assert all(one <= other + 1e-6 for one, other in pairwise(times))
    assert times[0] >= 0
