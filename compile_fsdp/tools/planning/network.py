"""How long a step takes on a network of two levels: ranks of a host, and hosts.

A model and no measurement: compute by `Costs`, one collective after the other on one wire, each group gathered while
the one before it computes, and reduced while the next one does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Network:
    """What connects the ranks.

    Attributes:
        within: Costs of a device and of the collectives of ranks that share a host.
        ranks_per_host: Ranks that share a host.
        host_bandwidth: Bytes per second into a host, and out of it.
    """

    within: Costs
    ranks_per_host: int
    host_bandwidth: float

    def shard_collective(self, shard_bytes: int, ranks: int) -> float:
        """Seconds of an all-gather of shards of this size, or of a reduce-scatter into them, over the first ranks."""
        if ranks <= self.ranks_per_host:
            return self.within.collective(shard_bytes, ranks)
        # What comes into a host is passed on within it meanwhile. A tree of hosts adds its depth to the latency.
        bandwidth = min(self.within.comm_bandwidth, self.host_bandwidth)
        return self._latency(ranks / self.ranks_per_host) + shard_bytes * (ranks - 1) / bandwidth

    def replica_collective(self, shard_bytes: int, hosts: float) -> float:
        """Seconds of all-reduces over the hosts, of a shard of this size on each rank of a host at a time, by rings."""
        if hosts <= 1:
            return 0.0
        sent = 2 * (hosts - 1) / hosts * shard_bytes * self.ranks_per_host
        return self._latency(hosts) + sent / self.host_bandwidth

    def _latency(self, hosts: float) -> float:
        return self.within.latency * (1 + math.log2(hosts))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The estimated time of a step.

    Attributes:
        compute: Seconds of forward and backward.
        exposed: Seconds in which they wait for communication.
    """

    compute: float
    exposed: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """What is computed from the first use of a group to that of the next one.

    Attributes:
        seconds: Of the forward.
        backward: Of its backward.
        gather: Of the group's all-gather.
        reduction: Of its reduce-scatter; 0 if it has no gradients.
        replication: Of the all-reduce of what that leaves; 0 without replicas.
        is_kept: Whether the backward does not gather the group again.
    """

    seconds: float
    backward: float
    gather: float
    reduction: float
    replication: float
    is_kept: bool


def step_time(timeline: Timeline, network: Network, replicas: int = 1, kept: Collection[int] = ()) -> StepTime:
    """The time of a step.

    Args:
        timeline: On the ranks that parameters are sharded over.
        network: That connects them.
        replicas: How many such sets of ranks there are: hosts, with HSDP.
        kept: Numbers of the groups that stay unsharded from the forward to the backward.
    """
    segments = list(_segments(timeline, network, replicas, kept))
    now = wire_free = arrived = 0.0
    for i, each in enumerate(segments):
        if i == 0:
            arrived = wire_free = each.gather
        now = max(now, arrived)
        if i + 1 < len(segments):
            arrived = wire_free = max(now, wire_free) + segments[i + 1].gather
        now += each.seconds
    arrived, replicated = now, 0.0
    for i, each in enumerate(reversed(segments)):
        following = segments[-2 - i] if i + 1 < len(segments) else None
        if i == 0 and not each.is_kept:
            arrived = wire_free = now + each.gather
        now = max(now, arrived)
        if following is not None and not following.is_kept:
            arrived = wire_free = max(now, wire_free) + following.gather
        now += each.backward
        if each.reduction:
            wire_free = max(now, wire_free) + each.reduction
        if each.replication:
            replicated = max(wire_free, replicated) + each.replication
    end = max(now, wire_free, replicated)
    compute = sum(each.seconds + each.backward for each in segments)
    return StepTime(compute, end - compute)


def _segments(timeline: Timeline, network: Network, replicas: int, kept: Collection[int]) -> Iterator[_Segment]:
    groups, ranks = timeline.step.groups, timeline.ranks
    starts = [0, *(min(group.uses) for group in groups[1:])]
    for group, start, end in zip(groups, starts, [*starts, len(timeline.seconds)][1:], strict=True):
        trained = (each for each in group.parameters if each.needs_grad)
        shard, reduced = group.size // ranks, sum(each.sharding.reduced_bytes for each in trained) // ranks
        yield _Segment(
            seconds=sum(timeline.seconds[start:end]),
            backward=sum(timeline.backward_seconds[start:end]),
            gather=network.shard_collective(shard, ranks),
            reduction=network.shard_collective(reduced, ranks) if reduced else 0.0,
            replication=network.replica_collective(reduced, replicas) if reduced else 0.0,
            is_kept=not group.frees or group.number in kept,
        )
