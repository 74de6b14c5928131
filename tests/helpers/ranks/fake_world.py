"""One rank of a world of any size, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from compile_fsdp.tools import launch


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank whose collectives do nothing: for graphs, not values."""
    torch._dynamo.reset()
    with launch.fake_world(world_size, rank):
        yield
