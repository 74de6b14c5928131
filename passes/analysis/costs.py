"""Costs of compute, copies and collectives, by which passes decide.

[Note: Costs are equal on all ranks]
Ranks that decided differently would issue different collectives, and hang. So costs are constants, or the user gives
equal costs to all ranks. Decisions by these costs depend on sizes that all ranks share: padded shards and whole
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from compile_fsdp.ops.call_block import BLOCK_CALLS, find_part
from compile_fsdp.passes.analysis.aliases import fake_arguments, fake_value, find_fake_tensor, is_declared_view
from compile_fsdp.passes.analysis.collectives import is_all_reduce, is_fetch, is_gather, is_offload, ranks_of
from compile_fsdp.passes.analysis.layout import size_hint
from compile_fsdp.torch_compat.dispatch import OpOverload, flop_formula


@dataclass(frozen=True, slots=True)
class Costs:
    """Alpha-beta model of communication, and roofline model of compute.

    Attributes:
        latency: Seconds that a collective of any size takes.
        comm_bandwidth: Bytes per second that a rank receives.
        memory_bandwidth: Bytes per second that a kernel reads and writes together.
        flops: Floating-point operations per second.
        rows: Tokens, or batch rows, that a rank computes with at a time. Decisions that all ranks share use this
            number, not the rank's own number of rows. 0: the rows of the largest batch among the ranks.
        offload_bandwidth: Bytes per second between device and host memory, each way. 0 if nothing is offloaded, as on a
            CPU.
    """

    latency: float
    comm_bandwidth: float
    memory_bandwidth: float
    flops: float
    rows: int = 0
    offload_bandwidth: float = 0.0

    def collective(self, shard_bytes: int, ranks: int) -> float:
        """Return the seconds of an all-gather of shards of this size, or of a reduce-scatter into them."""
        return self.latency + shard_bytes * (ranks - 1) / self.comm_bandwidth

    def all_reduce(self, size_bytes: int) -> float:
        """Return the seconds of an all-reduce of so many bytes."""
        return self.latency + 2 * size_bytes / self.comm_bandwidth

    def collectives(self, count: int, shard_bytes: int, ranks: int) -> float:
        """Return the seconds of `count` collectives, on shards of this size in total."""
        return self.collective(shard_bytes, ranks) + (count - 1) * self.latency if count else 0.0

    def compute(self, flops: int, moved_bytes: int) -> float:
        """Return the seconds of a kernel: the larger of its seconds for compute and for memory."""
        return max(moved_bytes / self.memory_bandwidth, flops / self.flops)

    def copy(self, size_bytes: int) -> float:
        """Return the seconds to read and write so many bytes."""
        return 2 * size_bytes / self.memory_bandwidth

    def transfer(self, size_bytes: int) -> float:
        """Return the seconds to copy between device and host memory; 0 without offloading."""
        return size_bytes / self.offload_bandwidth if self.offload_bandwidth else 0.0

    def pack_bytes(self, ranks: int, *, is_spare: bool = False) -> int:
        """Return the most shard bytes that share a collective.

        A pack is in memory from its first use to its last, so small packs are better. Latency is a third of a pack's
        time; a ninth if memory is to spare (`is_spare`).
        """
        return int((8 if is_spare else 2) * self.latency * self.comm_bandwidth / max(ranks - 1, 1))

    def small_bytes(self, ranks: int) -> int:
        """Return the most shard bytes that groups have together if they share a collective without a budget.

        Latency is half of such a collective's time.
        """
        return int(self.latency * self.comm_bandwidth / max(ranks - 1, 1))


# By device type. CPU: measured with two gloo ranks on one core each (benchmarks/results/steps_cpu_202611.md). CUDA:
# about 60 % of the peaks in the data sheet of an H100 SXM, 8 of them connected by NVLink and to their hosts by PCIe 5.
COSTS: Mapping[str, Costs] = MappingProxyType(
    {
        "cpu": Costs(latency=1e-3, comm_bandwidth=0.6e9, memory_bandwidth=6e9, flops=30e9, rows=512),
        "cuda": Costs(
            latency=20e-6, comm_bandwidth=250e9, memory_bandwidth=2e12, flops=500e12, rows=8192, offload_bandwidth=40e9
        ),
    }
)


def usual_costs(device: torch.device) -> Costs:
    """Return the built-in costs of a device; the "cuda" costs if unknown."""
    return COSTS.get(device.type, COSTS["cuda"])


def device_costs(collective: fx.Node) -> Costs:
    """Return the built-in costs of the device that a collective runs on."""
    tensor = find_fake_tensor(collective)
    assert tensor is not None
    return usual_costs(tensor.device)


def size_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensor; 0 if there is no tensor, or its size is symbolic."""
    tensor = find_fake_tensor(node)
    if tensor is None or not all(isinstance(size, int) for size in tensor.shape):
        return 0
    return math.prod(tensor.shape) * tensor.itemsize


def compute_seconds(node: fx.Node, costs: Costs) -> float:
    """Return the seconds of a node's flops, if torch counts them, or of its writes if longer; views are free."""
    if node.target in BLOCK_CALLS:
        *_, name = node.args
        assert isinstance(name, str)
        return sum(costs.compute(*work) for work in find_part(name).work)
    return costs.compute(*work_of(node))


def work_of(node: fx.Node) -> tuple[int, int]:
    """Return the flops of a node, as far as torch counts them, and the bytes that it writes; 0 for views.

    Symbolic flops are those of the present sizes; bytes of symbolic size are left out.
    """
    target = node.target
    if not isinstance(target, OpOverload) or is_declared_view(node):
        return 0, 0
    moved, formula = size_bytes(node), flop_formula(target)
    if formula is None or moved == 0:
        return 0, moved
    args, kwargs = fake_arguments((node.args, node.kwargs))
    return size_hint(formula(*args, **kwargs, out_val=fake_value(node))), moved


def communication(node: fx.Node, costs: Costs) -> tuple[int, float]:
    """Return the bytes and seconds of a collective or host copy: bytes of an all-gather's output, else of the input."""
    sent = size_bytes(node.all_input_nodes[0])
    if is_offload(node) or is_fetch(node):
        return sent, costs.transfer(sent)
    if is_all_reduce(node):
        return sent, costs.all_reduce(sent)
    ranks = ranks_of(node)
    whole = sent * ranks if is_gather(node) else sent
    return whole, costs.collective(whole // ranks, ranks)


def usual_compute_seconds(node: fx.Node, parameter_numel: int, costs: Costs) -> float:
    """Return the seconds of a parameter's product for the usual rows.

    A product that makes the parameter's gradient takes equally long. Ops without a flop formula are free.
    """
    target = node.target
    counts = target in BLOCK_CALLS or (isinstance(target, OpOverload) and flop_formula(target) is not None)
    return 2 * costs.rows * parameter_numel / costs.flops if counts else 0.0


def plan_gathers(shards: Sequence[int], ranks: int, costs: Costs, *, is_spare: bool = False) -> list[list[int]]:
    """Plan which shards are gathered together, by their bytes; see `Costs.pack_bytes` and `plan_packs`."""
    # A shard whose copies in and out take longer than a launch gets its own all-gather.
    are_alone = [costs.copy(size) + costs.copy(size * ranks) > costs.latency for size in shards]
    return plan_packs(shards, are_alone, costs.pack_bytes(ranks, is_spare=is_spare))


def plan_reductions(gradients: Sequence[int], ranks: int, costs: Costs, *, is_spare: bool = False) -> list[list[int]]:
    """Plan which gradients are reduced together, by their bytes; see `Costs.pack_bytes` and `plan_packs`."""
    # A gradient whose copy in takes longer than a launch gets its own reduce-scatter.
    are_alone = [costs.copy(size) > costs.latency for size in gradients]
    return plan_packs(gradients, are_alone, costs.pack_bytes(ranks, is_spare=is_spare) * ranks)


def plan_packs(sizes: Sequence[int], are_alone: Sequence[bool], limit: int) -> list[list[int]]:
    """Return the positions of the tensors in each collective, in the order of their first position.

    Next-fit, because consecutive tensors are used together. `sizes` are the bytes of each tensor, and `limit` the most
    bytes in a collective of several tensors. A tensor of `are_alone` gets a separate collective.
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
