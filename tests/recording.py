"""What one rank did in a stretch of code: its collectives, and its peak of allocated memory."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from compile_fsdp.bench.measure import peak_bytes
from compile_fsdp.compat import executed_collectives

_ITEM_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Int": 4, "Long": 8}

# Options with which a gather between two ranks is executed as one.
AS_GATHERS: dict[str, object] = {"disabled_passes": {"exchange_pairs"}}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as the backend executed it.

    gloo executes a reduce-scatter as an all-reduce. What `exchange_pairs` made of a gather or a reduce-scatter is an
    all-to-all of this rank's share.
    """

    kind: str  # "all_gather", "all_reduce", ...
    group: str  # its ranks
    dtype: str
    numel: int  # of the input

    @property
    def bytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.kind}({self.dtype.lower()}[{self.numel}], {self.group})"


def _entries() -> list[dict[str, Any]]:
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    return list(trace.get("entries", []))


def collectives_of(run: Callable[[], None]) -> list[Collective]:
    """The collectives that `run` issues on this rank, in order."""
    before = executed_collectives()
    run()
    entries = [entry for entry in _entries() if entry["record_id"] >= before]
    assert min((entry["record_id"] for entry in entries), default=before) == before, "the recorder has forgotten some"
    names = dist.distributed_c10d._world.pg_names
    ranks = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
    return [
        Collective(
            kind=entry["profiling_name"].removeprefix("gloo:"),
            group=str(ranks[entry["process_group"][0]]),
            dtype=entry["input_dtypes"][0],
            numel=sum(math.prod(size) for size in entry["input_sizes"]),
        )
        for entry in entries
    ]


def record(run: Callable[[], None]) -> tuple[list[Collective], int]:
    """The collectives of `run`, and the most bytes it has allocated at one time over what was there before."""
    collectives: list[Collective] = []
    peak = peak_bytes(lambda: collectives.extend(collectives_of(run)))
    return collectives, peak
