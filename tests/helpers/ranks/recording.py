"""Record one rank's collectives and peak memory during a call."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from compile_fsdp.tools.bench.measure import peak_bytes, synchronize
from compile_fsdp.torch_compat.distributed import executed_collectives
from helpers.ranks.pools import device_type

_ITEM_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Int": 4, "Long": 8}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as the backend executed it.

    gloo executes a reduce-scatter as an all-reduce. The runtime's gathers and reduce-scatters between two ranks on gloo
    are all-to-alls of this rank's share: see [Note: gloo between two ranks].
    """

    kind: str  # "all_gather", "all_reduce", ...
    group: str  # its ranks
    dtype: str
    numel: int  # elements of the input

    @property
    def bytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.kind}({self.dtype.lower()}[{self.numel}], {self.group})"


def collectives_of(run: Callable[[], None]) -> list[Collective]:
    """Record the collectives that `run` issues on this rank, in order.

    On an accelerator they are sorted by group: each group has its own stream, so the order across groups is random.
    """
    synchronize(_device())
    before = executed_collectives()
    run()
    synchronize(_device())
    recorded = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
    entries = [entry for entry in recorded if entry["record_id"] >= before]
    assert min((entry["record_id"] for entry in entries), default=before) == before, "the recorder has forgotten some"
    names = dist.distributed_c10d._world.pg_names
    ranks = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
    if device_type() != "cpu":
        # Sort by the group's description and size, which are equal on all ranks.
        entries.sort(key=lambda entry: (entry["process_group"][1], len(ranks[entry["process_group"][0]])))
    return [
        Collective(
            kind=entry["profiling_name"].removeprefix("gloo:"),
            group=str(ranks[entry["process_group"][0]]),
            dtype=entry["input_dtypes"][0],
            numel=sum(math.prod(size) for size in entry["input_sizes"]),
        )
        for entry in entries
    ]


def gathers_of(run: Callable[[], object]) -> int:
    """Number of the runtime's all-gather ops that `run` calls, whatever collective executes them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return sum(each.count for each in profiled.key_averages() if each.key == "compile_fsdp::all_gather_into_tensor")


def record(run: Callable[[], None]) -> tuple[list[Collective], int]:
    """Return the collectives of `run` and its peak bytes above the starting level."""
    collectives: list[Collective] = []
    peak = peak_bytes(lambda: collectives.extend(collectives_of(run)), _device())
    return collectives, peak


def _device() -> torch.device:
    return torch.device(device_type())
