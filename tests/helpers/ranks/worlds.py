"""Run worlds of several sizes in one pool, because starting ranks takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def world_of(rank: int, size: int, folder: str, name: str) -> Iterator[bool]:
    """Make a world of the first `size` ranks; the remaining ranks get False and wait."""
    dist.barrier()
    full_size = dist.get_world_size()
    dist.destroy_process_group()

    def join(size: int, name: str) -> None:
        store = dist.FileStore(f"{folder}/{name}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    if rank < size:
        join(size, f"{name}_inside")
    yield rank < size
    if rank < size:
        dist.destroy_process_group()
    join(full_size, f"{name}_after")
    dist.barrier()
