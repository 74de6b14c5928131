"""Measure what collectives, copies, products of matrices and the link to the host take on the ranks of a group.

Of several runs the shortest counts: what else the machine does makes a run longer, and nothing makes it shorter. A run
of collectives has many of them, one after the other as in a step. A CPU computes meanwhile, as it does in a step: its
cores serve both, and a short collective beside a product of matrices takes twice as long as one that is alone.
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
LOCAL_S = 0.2  # seconds after which a slow device, whose runs differ less, is not measured again

SHORT_RUN, LONG_RUN = 24, 4  # collectives of a run: short ones, and longer ones
SHORT_SHARD = 2**10  # bytes that a rank has of the whole in the shortest collective


@dataclass(frozen=True, slots=True)
class _Amounts:
    """How much is measured with: so much that it takes milliseconds.

    Attributes:
        wholes: Bytes of what is gathered, and reduced.
        copied: Bytes of a copied tensor: more than caches hold.
        side: Rows and columns of matrices.
        side_beside: The same of those that are multiplied beside a collective; 0 for none.
    """

    wholes: tuple[int, ...]
    copied: int
    side: int
    side_beside: int


_ON_CPU = _Amounts(wholes=(2**22, 2**24), copied=2**26, side=512, side_beside=256)
_ON_ACCELERATOR = _Amounts(wholes=(2**24, 2**27), copied=2**28, side=4096, side_beside=0)


@dataclass(frozen=True, slots=True)
class Link:
    """What one kind of collective takes over one process group.

    Attributes:
        latency: Seconds of the shortest.
        bandwidth: Bytes per second that a rank receives in long ones.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured on one kind of device, over one process group.

    Attributes:
        gather: All-gathers.
        reduction: Reduce-scatters.
        copy_bandwidth: Bytes per second that a copy reads and writes together.
        flops: Floating-point operations per second of a product of matrices.
        offload_bandwidth: Bytes per second from the device to the host's memory, or back; 0 for a CPU, which has one.
    """

    gather: Link
    reduction: Link
    copy_bandwidth: float
    flops: float
    offload_bandwidth: float = 0.0

    def costs(self, usual: Costs) -> Costs:
        """These numbers as costs, each the usual one times a power of two.

        What is decided by costs is part of the keys of compiler caches, and two measurements are never equal; their
        powers of two are, up to a factor of 1.4.
        """
        latency = (self.gather.latency + self.reduction.latency) / 2
        comm_bandwidth = 2 / (1 / self.gather.bandwidth + 1 / self.reduction.bandwidth)
        return Costs(
            latency=_near(latency, usual.latency),
            comm_bandwidth=_near(comm_bandwidth, usual.comm_bandwidth),
            memory_bandwidth=_near(self.copy_bandwidth, usual.memory_bandwidth),
            flops=_near(self.flops, usual.flops),
            rows=usual.rows,
            offload_bandwidth=_near(self.offload_bandwidth, usual.offload_bandwidth) if self.offload_bandwidth else 0.0,
        )


def _near(measured: float, usual: float) -> float:
    return usual * 2.0 ** round(math.log2(measured / usual))


@torch.no_grad()
def measure(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Measurements:
    """Measure, on all ranks of a process group at once: it issues collectives.

    Args:
        group: Of two ranks or more.
        device: Of this rank.
        dtype: Of the matrices.
    """
    gather, reduction = (measure_link(collective, group, device) for collective in (_gather, _reduce_scatter))
    link_to_host = measure_offloads(device) if device.type != "cpu" else 0.0
    return Measurements(gather, reduction, measure_copies(device), measure_products(device, dtype), link_to_host)


def measure_link(
    collective: Callable[[torch.Tensor, dist.ProcessGroup], Callable[[], torch.Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Link:
    """Latency of the shortest collective, bandwidth of longer ones."""
    ranks = group.size()
    shards = [SHORT_SHARD, *(whole // ranks for whole in _amounts(device).wholes)]
    counts = [SHORT_RUN, *(LONG_RUN for _ in shards[1:])]
    latency, *seconds = (
        _measure_collective(collective(_zeros(shard, device), group), count, device)
        for shard, count in zip(shards, counts, strict=True)
    )
    # A link may be so fast that the latency is all there is.
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

    def repeat(run: Callable[[], None]) -> None:
        for _ in range(count):
            run()

    seconds = _shortest(partial(repeat, both), device)
    return max(seconds - _shortest(partial(repeat, compute), device), seconds / 10) / count


def measure_copies(device: torch.device) -> float:
    """Bytes per second, read and written."""
    size = _amounts(device).copied
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
    return 2 * size / _shortest(lambda: target.copy_(source), device, LOCAL_S)


def measure_offloads(device: torch.device) -> float:
    """Bytes per second to pinned memory and back, the slower of the two."""
    size = _amounts(device).copied
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    away = _shortest(lambda: host.copy_(here, non_blocking=True), device, LOCAL_S)
    return size / max(away, _shortest(lambda: here.copy_(host, non_blocking=True), device, LOCAL_S))


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second."""
    side = _amounts(device).side
    left, right = torch.zeros(2, side, side, dtype=dtype, device=device)
    return 2 * side**3 / _shortest(lambda: torch.mm(left, right), device, LOCAL_S)


# Issued as graphs issue them.


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    return partial(functional_collectives.all_gather_into_tensor, shard, group.size(), group.group_name)


def _reduce_scatter(shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    whole = shard.repeat(group.size())
    return partial(functional_collectives.reduce_scatter_tensor, whole, "sum", group.size(), group.group_name)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size // 4, dtype=torch.float32, device=device)


def _shortest(run: Callable[[], object], device: torch.device, limit_s: float = math.inf) -> float:
    """Seconds of the shortest run; one before them counts for nothing. Behind a limit there are no more than two."""
    seconds: list[float] = []
    while len(seconds) <= RUNS and (len(seconds) < 2 or sum(seconds) < limit_s):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _amounts(device: torch.device) -> _Amounts:
    return _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
