"""Times and live bytes of a step: nodes compute one after the other, and links carry data meanwhile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Clock:
    """Seconds (n,) from the beginning of the first node to the start of each node, if no node has to wait."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.starts = [0.0, *accumulate(seconds)][:-1]

    def last_before(self, second: float) -> int:
        """Return the last position reached by then; the first, if none is."""
        return max(bisect_right(self.starts, second) - 1, 0)

    def first_after(self, second: float) -> int:
        """Return the first position reached no earlier; the last, if none is."""
        return min(bisect_left(self.starts, second), len(self.starts) - 1)


class Link:
    """A link that carries one collective, or one copy, at a time."""

    def __init__(self) -> None:
        self.free = 0.0  # seconds from the beginning of the step until the link is free

    def send(self, launched: float, seconds: float) -> float:
        """Return when a transfer of so many seconds begins, if launched at this second."""
        start = max(launched, self.free)
        self.free = start + seconds
        return start


class LiveBytes:
    """Sums of the bytes that are held at each of `places` places."""

    def __init__(self, places: int) -> None:
        self._changes = [0] * (places + 1)

    def hold(self, first: int, last: int, size: int) -> None:
        """Hold `size` bytes from a place to a later place, both included; nothing if `last` comes before `first`."""
        if first <= last:
            self._changes[first] += size
            self._changes[last + 1] -= size

    def totals(self) -> list[int]:
        return list(accumulate(self._changes[:-1]))
