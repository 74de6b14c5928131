"""Costs of collectives on a network of two levels: ranks of a host, and hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from compile_fsdp.passes import Costs


@dataclass(frozen=True, slots=True)
class Network:
    """The connections between ranks. Consecutive ranks share a host."""

    within: Costs  # of a device, and of collectives within a host
    ranks_per_host: int = 8
    host_bandwidth: float = 240e9  # bytes per second into a host; as many leave it at the same time

    def shard_costs(self, shards: int) -> Costs:
        """Return the costs of all-gathers and reduce-scatters over the first `shards` ranks."""
        # Ranks of a host pass on the bytes that enter the host, so one collective has the whole link.
        return self._costs(self._hosts(shards), self.host_bandwidth)

    def replica_costs(self, shards: int, replicas: int) -> Costs:
        """Return the costs of all-reduces over `replicas` ranks that are `shards` ranks apart."""
        # Each rank of a host all-reduces a different shard, and all of them share the link.
        bandwidth = self.host_bandwidth / min(shards, self.ranks_per_host)
        return self._costs(min(self._hosts(shards * replicas), replicas), bandwidth)

    def _hosts(self, ranks: int) -> int:
        return math.ceil(ranks / self.ranks_per_host)

    def _costs(self, hosts: int, bandwidth: float) -> Costs:
        if hosts == 1:
            return self.within
        latency = self.within.latency * (1 + math.log2(hosts))  # a tree of hosts
        return replace(self.within, latency=latency, comm_bandwidth=min(self.within.comm_bandwidth, bandwidth))
