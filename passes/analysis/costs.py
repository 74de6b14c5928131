"""What compute, copies and collectives cost: the numbers by which passes decide.

[Note: Costs are equal on all ranks]
Ranks that decided differently would issue different collectives, and hang. So costs are constants, or what one rank has
measured for all (`compile_fsdp/backend/costs.py`), and what is decided by them depends on sizes that all ranks share:
padded shards and whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_arguments, fake_value, find_fake_tensor
from compile_fsdp.torch_compat.dispatch import OpOverload, argument_aliasing, flop_formula


@dataclass(frozen=True, slots=True)
class Costs:
    """An alpha-beta model of communication and a roofline of compute.

    Attributes:
        latency: Seconds that a collective takes whatever its size.
        comm_bandwidth: Bytes per second that a rank receives.
        memory_bandwidth: Bytes per second that a kernel reads and writes together.
        flops: Floating-point operations per second.
        rows: Tokens, or other rows of a batch, that a rank computes with at a time. Nothing is decided by its own
            number where all ranks have to decide alike.
        offload_bandwidth: Bytes per second between the device and its host's memory, each way; 0 if nothing is to be
            offloaded, as on a CPU.
    """

    latency: float
    comm_bandwidth: float
    memory_bandwidth: float
    flops: float
    rows: int = 256
    offload_bandwidth: float = 0.0

    def collective(self, shard_bytes: int, ranks: int) -> float:
        """Seconds for an all-gather of shards of this size, or for a reduce-scatter into them."""
        return self.latency + shard_bytes * (ranks - 1) / self.comm_bandwidth

    def copy(self, size_bytes: int) -> float:
        """Seconds for reading and writing so many bytes."""
        return 2 * size_bytes / self.memory_bandwidth

    def transfer(self, size_bytes: int) -> float:
        """Seconds between the device and its host's memory; 0 where nothing is offloaded."""
        return size_bytes / self.offload_bandwidth if self.offload_bandwidth else 0.0

    def pack_bytes(self, ranks: int, *, is_spare: bool = False) -> int:
        """Most bytes of shards in one collective, as long as several fit.

        A pack is in memory from its first use to its last, so small packs are better: of those of this size, latency is
        a third of their time. Where memory is to spare (`is_spare`), a ninth.
        """
        return int((8 if is_spare else 2) * self.latency * self.comm_bandwidth / max(ranks - 1, 1))


# By device type. The CPU's: two gloo ranks on one core each (benchmarks/results/steps_cpu_202611.md). CUDA's: the
# data sheet of an H100 SXM, 8 of them connected by NVLink and to their hosts by PCIe 5, at about 60 % of its peaks.
COSTS: Mapping[str, Costs] = MappingProxyType(
    {
        "cpu": Costs(latency=1e-3, comm_bandwidth=0.6e9, memory_bandwidth=6e9, flops=30e9, rows=512),
        "cuda": Costs(
            latency=20e-6,
            comm_bandwidth=250e9,
            memory_bandwidth=2e12,
            flops=500e12,
            rows=8192,
            offload_bandwidth=40e9,
        ),
    }
)


def usual_costs(device: torch.device) -> Costs:
    """The built-in costs of a device; those of "cuda" for one that we have none of."""
    return COSTS.get(device.type, COSTS["cuda"])


def device_costs(collective: fx.Node) -> Costs:
    """The built-in costs where a collective runs."""
    tensor = find_fake_tensor(collective)
    assert tensor is not None
    return usual_costs(tensor.device)


def size_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor; 0 if there is none, or they depend on a symbol."""
    tensor = find_fake_tensor(node)
    if tensor is None or not all(isinstance(size, int) for size in tensor.shape):
        return 0
    return math.prod(tensor.shape) * tensor.itemsize


def are_contiguous(nodes: Sequence[fx.Node]) -> bool:
    tensors = [find_fake_tensor(node) for node in nodes]
    return all(tensor is not None and tensor.is_contiguous() for tensor in tensors)


def compute_seconds(node: fx.Node, costs: Costs) -> float:
    """What a node computes: its flops where torch counts them, else the bytes of its result; views are free."""
    target = node.target
    if not isinstance(target, OpOverload) or any(each.aliased for each in argument_aliasing(target)):
        return 0.0
    moved = size_bytes(node) / costs.memory_bandwidth
    formula = flop_formula(target)
    if formula is None or moved == 0:
        return moved
    args, kwargs = fake_arguments((node.args, node.kwargs))
    return max(moved, formula(*args, **kwargs, out_val=fake_value(node)) / costs.flops)


def usual_compute_seconds(node: fx.Node, parameter_numel: int, costs: Costs) -> float:
    """What a product with a parameter, or one that makes its gradient, takes with the usual rows; others are free."""
    counts = isinstance(node.target, OpOverload) and flop_formula(node.target) is not None
    return 2 * costs.rows * parameter_numel / costs.flops if counts else 0.0


def plan_gathers(shards: Sequence[int], ranks: int, limit: int, costs: Costs) -> list[list[int]]:
    """Which shards are gathered together, by their bytes: alone goes what is longer copied in and out than launched."""
    return plan_packs(shards, [costs.copy(size) + costs.copy(size * ranks) > costs.latency for size in shards], limit)


def plan_reductions(gradients: Sequence[int], limit: int, costs: Costs) -> list[list[int]]:
    """Which gradients are reduced together, by their bytes: alone goes what is longer copied in than launched."""
    return plan_packs(gradients, [costs.copy(size) > costs.latency for size in gradients], limit)


def plan_packs(sizes: Sequence[int], are_alone: Sequence[bool], limit: int) -> list[list[int]]:
    """Which tensors share a collective.

    Args:
        sizes: (n,) bytes of each tensor.
        are_alone: (n,) whether it gets a collective of its own.
        limit: Most bytes in a collective of several.
    Returns:
        Positions by collective, none empty, in the order of their first.
    Source: next-fit, since tensors that follow each other are used together.
    """
    packs: list[list[int]] = []
    free = -1  # bytes that still fit into the last shared pack
    for i, size in enumerate(sizes):
        if are_alone[i]:
            packs.append([i])
            continue
        if size > free:
            shared: list[int] = []
            packs.append(shared)
            free = limit
        shared.append(i)
        free -= size
    return packs
