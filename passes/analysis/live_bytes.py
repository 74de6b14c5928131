"""Live bytes at each place of a step or graph."""

from __future__ import annotations

from itertools import accumulate


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
