"""Measure the speed of collectives, copies, matmuls and host transfers on the ranks of a process group.

The shortest of several runs counts, because other load on the machine only makes a run longer. A run of collectives
issues many in sequence, as a step does. On a CPU, matmuls run beside the collectives, as in a step: both share the
cores, and a short collective takes twice as long beside a matmul as alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from compile_fsdp.passes import Costs
from compile_fsdp.torch_compat.distributed import functional_collectives

RUNS = 3
LOCAL_S = 0.2  # seconds after which local measurements stop; the runs of a slow device differ less

SHORT_RUN, LONG_RUN = 24, 4  # collectives in a run of the shortest size, and of longer sizes
SHORT_SHARD = 2**10  # bytes of a rank's shard in the shortest collective


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Sizes of the measured operations, chosen to take milliseconds."""

    wholes: tuple[int, ...]  # bytes of the all-gather outputs and reduce-scatter inputs
    copied: int  # bytes of a copied tensor, more than the caches hold
    side: int  # rows and columns of the multiplied matrices
    side_beside: int  # rows and columns of the matrices multiplied beside a collective; 0 for no matmul


_ON_CPU = _Amounts(wholes=(2**22, 2**24), copied=2**26, side=512, side_beside=256)
_ON_ACCELERATOR = _Amounts(wholes=(2**24, 2**27), copied=2**28, side=4096, side_beside=0)


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of all-gathers or reduce-scatters over a process group."""

    latency: float  # seconds of the shortest collective
    bandwidth: float  # bytes per second that a rank receives in long collectives


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured speeds of a device type and a process group."""

    gather: Link
    reduction: Link
    copy_bandwidth: float  # bytes per second that a copy reads and writes together
    flops: float  # floating-point operations per second of a matmul
    offload_bandwidth: float = 0.0  # bytes per second from or to host memory, the slower of the two; 0 for a CPU

    def costs(self, usual: Costs) -> Costs:
        """Round each speed to a power-of-two multiple of the built-in cost.

        Costs are part of compiler cache keys. Two measurements are never equal, but their rounded values are, and each
        is within a factor of 1.4 of its measurement.
        """
        latency = (self.gather.latency + self.reduction.latency) / 2
        comm_bandwidth = 2 / (1 / self.gather.bandwidth + 1 / self.reduction.bandwidth)
        return Costs(
            latency=_near(latency, usual.latency),
            comm_bandwidth=_near(comm_bandwidth, usual.comm_bandwidth),
            memory_bandwidth=_near(self.copy_bandwidth, usual.memory_bandwidth),
            flops=_near(self.flops, usual.flops),
            offload_bandwidth=_near(self.offload_bandwidth, usual.offload_bandwidth) if self.offload_bandwidth else 0.0,
        )


def _near(measured: float, usual: float) -> float:
    return usual * 2.0 ** round(math.log2(measured / usual))


@torch.no_grad()
def measure(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Measurements:
    """Measure the speeds, with matrices of `dtype`. Collective over a group of at least two ranks."""
    gather, reduction = (measure_link(collective, group, device) for collective in (_gather, _reduce_scatter))
    link_to_host = measure_offloads(device) if device.type != "cpu" else 0.0
    return Measurements(gather, reduction, measure_copies(device), measure_products(device, dtype), link_to_host)


def measure_link(
    collective: Callable[[torch.Tensor, dist.ProcessGroup], Callable[[], torch.Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Link:
    """Measure the latency of the shortest collective and the bandwidth of longer collectives."""
    ranks = group.size()
    shards = [SHORT_SHARD, *(whole // ranks for whole in _amounts(device).wholes)]
    inputs = [torch.zeros(shard // 4, dtype=torch.float32, device=device) for shard in shards]
    latency, *seconds = (
        _measure_collective(collective(shard, group), LONG_RUN if index else SHORT_RUN, device)
        for index, shard in enumerate(inputs)
    )
    # On a fast link, latency can be nearly all of the time.
    sending = sum(max(each - latency, each / 10) for each in seconds)
    return Link(latency, sum(shards[1:]) * (ranks - 1) / sending)


def _measure_collective(launch: Callable[[], torch.Tensor], count: int, device: torch.device) -> float:
    side = _amounts(device).side_beside
    left, right = torch.zeros(2, side, side, device=device)

    def compute() -> None:
        for _ in range(2 if side else 0):
            torch.mm(left, right)

    def both() -> None:
        launched = launch()
        compute()
        functional_collectives.wait_tensor(launched)

    seconds = _shortest(both, device, count=count)
    return max(seconds - _shortest(compute, device, count=count), seconds / 10) / count


def measure_copies(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes together."""
    size = _amounts(device).copied
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
    return 2 * size / _shortest(lambda: target.copy_(source), device, LOCAL_S)


def measure_offloads(device: torch.device) -> float:
    """Measure the bytes per second between device and pinned memory, in the slower direction."""
    size = _amounts(device).copied
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    away = _shortest(lambda: host.copy_(here, non_blocking=True), device, LOCAL_S)
    return size / max(away, _shortest(lambda: here.copy_(host, non_blocking=True), device, LOCAL_S))


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of a matmul."""
    side = _amounts(device).side
    left, right = torch.zeros(2, side, side, dtype=dtype, device=device)
    return 2 * side**3 / _shortest(lambda: torch.mm(left, right), device, LOCAL_S)


# The collectives are issued as in a compiled graph.
def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    return partial(functional_collectives.all_gather_into_tensor, shard, group.size(), group.group_name)


def _reduce_scatter(shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    whole = shard.repeat(group.size())
    return partial(functional_collectives.reduce_scatter_tensor, whole, "sum", group.size(), group.group_name)


def _shortest(run: Callable[[], object], device: torch.device, limit_s: float = math.inf, count: int = 1) -> float:
    """Seconds of the shortest of `RUNS` runs, of `count` calls each, after a warm-up.

    Stops after `limit_s` seconds, but not before one run.
    """
    seconds: list[float] = []
    while len(seconds) <= RUNS and (len(seconds) < 2 or sum(seconds) < limit_s):
        start = time.perf_counter()
        for _ in range(count):
            run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _amounts(device: torch.device) -> _Amounts:
    return _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
