"""Overlap of communication with compute in a step, from its recorded launches.

The launches are laid out in time as if the host were never late: a launch starts when all earlier work of its stream,
and all work that its stream waits for, is done. Its duration is computed from its kind and its bytes, so a step has the
same overlap on every run and every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from helpers.device.install import install

# Time per byte. A matrix product also computes with each byte, and a link is slower than memory. With these values the
# tests' models communicate for about as long as they compute.
_MATRIX_PRODUCT, _COLLECTIVE, _OTHER = 8.0, 6.0, 1.0
_MATRIX_PRODUCTS = ("mm", "linear", "attention", "conv")


@dataclass(frozen=True)
class Launch:
    """One operation or collective that was enqueued."""

    operation: str
    stream: int  # its number
    clock: tuple[int, ...]  # for each stream, the number of tasks that precede it; for its own stream, its own position
    size_bytes: int  # bytes that it reads and writes

    @property
    def is_collective(self) -> bool:
        return self.operation.startswith("c10d::")

    @property
    def duration(self) -> float:
        if self.is_collective:
            return _COLLECTIVE * self.size_bytes
        is_product = self.operation.startswith("aten::") and any(name in self.operation for name in _MATRIX_PRODUCTS)
        return (_MATRIX_PRODUCT if is_product else _OTHER) * self.size_bytes


def launches_of(run: Callable[[], object]) -> list[Launch]:
    """Record this process's launches on the emulated device during `run`, in order."""
    extension = install()
    torch.accelerator.synchronize()
    extension.start_recording()
    try:
        run()
        torch.accelerator.synchronize()
    finally:
        recorded = extension.stop_recording()
    return [Launch(name, stream, tuple(clock), size) for name, stream, clock, size in recorded]


@dataclass(frozen=True)
class Overlap:
    """Overlap of a step's collectives with compute, as times."""

    duration: float  # of all collectives
    longest: float  # of the longest collective
    hidden: float  # of collectives during which another stream computes

    @property
    def share(self) -> float:
        """Hidden fraction of the communication time, from 0 to 1."""
        return self.hidden / self.duration


def overlap_of(launches: Sequence[Launch]) -> Overlap:
    """Lay out launches, including some collective, and measure their overlap."""
    ends: dict[int, list[tuple[int, float]]] = {}  # by stream: position and end time of each launch
    communication: list[tuple[float, float]] = []
    compute: list[tuple[float, float]] = []
    for launch in launches:
        begin = max((_end_of(ends.get(stream, []), count) for stream, count in enumerate(launch.clock)), default=0.0)
        end = begin + launch.duration
        ends.setdefault(launch.stream, []).append((launch.clock[launch.stream], end))
        (communication if launch.is_collective else compute).append((begin, end))
    durations = [end - begin for begin, end in communication]
    busy = _union(compute)
    return Overlap(sum(durations), max(durations), sum(_common(span, busy) for span in communication))


def _end_of(launches: Sequence[tuple[int, float]], count: int) -> float:
    """End time of a stream's last launch up to position `count`."""
    return next((end for position, end in reversed(launches) if position <= count), 0.0)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _common(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)
