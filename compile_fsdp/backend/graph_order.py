"""Name the rank that runs another graph than its peers, after all graphs were agreed on.

`agree` compares graphs before they first run. Later a rank may still run one that its peers do not run now, for example
because it alone validates. Then collectives fail, or wait until a timeout ends the job, and torch's error names neither
the graph nor the rank. So each rank notes in the process group's store which graph it begins, and an error is explained
from the notes of all ranks.

[Note: Steady steps note nothing]
A training loop runs the same graphs in every step. Each rank predicts the next graph from the period of the last ones,
and writes a note only where it begins another graph than predicted. Who reads the notes predicts in the same way, so
the notes are enough to know all graphs in their order.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from compile_fsdp.backend.agreement import first_difference, real_groups, shared_lines
from compile_fsdp.errors import CompileFSDPError, RanksPartedError
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.torch_compat.distributed import group_store

PATIENCE_S = 60.0  # a rank that begins no graph for so long looks whether another one runs other graphs
_READING_S = 10.0  # what reading the notes of all ranks may take
_WINDOW = 512  # graphs within which a period is looked for
_MOST_NOTES = 256  # a program without any period is not followed further

_log = logging.getLogger("compile_fsdp")


class Prediction:
    """Predicts the next graph of a rank: the one that followed the longest equal series of graphs before.

    Attributes:
        count: Graphs until now.
    """

    def __init__(self) -> None:
        self.count = 0
        self._begun: list[str] = []
        self._period = 0

    @property
    def next(self) -> str | None:
        """The graph; None if this can be any."""
        return self._begun[-self._period] if self._period else None

    def add(self, graph: str) -> bool:
        """Take note of the next graph; returns whether it was predicted."""
        is_predicted = graph == self.next
        self._begun.append(graph)
        self.count += 1
        if not is_predicted:
            self._period = self._find_period()
        if len(self._begun) > 2 * _WINDOW:
            del self._begun[:-_WINDOW]
        return is_predicted

    def _find_period(self) -> int:
        """How far back the longest series is that equals the last graphs; of several the first, at a step's begin."""
        window = self._begun[-_WINDOW:]
        longest = best = 0
        for period in range(1, len(window)):
            pairs = zip(reversed(window), reversed(window[:-period]), strict=False)
            length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(window) - period)
            if length and length >= longest:
                longest, best = length, period
        return best


class GraphOrder:
    """The graphs that this rank has begun in one process group, and those of its other ranks by their notes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._store = group_store(group)
        # A process group that was destroyed and made again may meet at the same store.
        again = (self._store.add("compile_fsdp/order/arrivals", 1) - 1) // group.size()
        self._prefix = f"compile_fsdp/order/{again}"
        self._graphs: dict[str, tuple[str, Sequence[str]]] = {}
        self._own = Prediction()
        self._notes: list[str] = []
        self._is_followed = True
        self._looked_at = 0

    def know(self, what: str, lines: Sequence[str]) -> str:
        """Add a graph, with its name in errors and its collectives; returns what notes call it."""
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        self._graphs.setdefault(digest, (what, lines))
        return digest

    def begin(self, graph: str) -> None:
        """This rank begins a graph."""
        if not self._is_followed or self._own.add(graph):
            return
        self._notes.append(f"{self._own.count - 1}:{graph}")
        self._is_followed = len(self._notes) < _MOST_NOTES
        try:
            self._store.set(f"{self._prefix}/{self._rank}", " ".join(self._notes))
        except RuntimeError as error:
            self._is_followed = False
            _log.debug("graphs are not noted any more: %s", error)

    def difference(self, only_certain: bool) -> str | None:
        """Where another rank has begun another graph than this one; None if no notes say so.

        Args:
            only_certain: Leave out a rank that may not have come so far, but would run another graph by its last step.
        """
        if not self._is_followed:
            return None
        end = time.monotonic() + _READING_S
        for rank in range(len(self._ranks)):
            if rank != self._rank and time.monotonic() < end:
                found = self._compare(rank, only_certain)
                if found is not None:
                    return found
        return None

    def look(self) -> None:
        """Write an error where this rank seems to wait for ranks that run other graphs."""
        count = self._own.count
        is_new, self._looked_at = count != self._looked_at, count
        # Once where it stands still.
        if not is_new and count and (found := self.difference(only_certain=True)) is not None:
            _log.error("no graph has begun for %g s, and %s", PATIENCE_S, found)

    def _compare(self, rank: int, only_certain: bool) -> str | None:
        if (notes := self._read(rank)) is None:
            return None
        last = max(notes)
        own_notes = {int(at): graph for at, _, graph in (note.partition(":") for note in self._notes)}
        own, other = Prediction(), Prediction()
        for at in range(self._own.count):
            first, second = own_notes.get(at, own.next), notes.get(at, other.next)
            if second is None:
                return None  # it has not come so far
            assert first is not None
            if first != second:
                is_certain = at <= last
                return self._describe(at, rank, first, second, is_certain) if is_certain or not only_certain else None
            own.add(first)
            other.add(second)
        return None

    def _read(self, rank: int) -> dict[int, str] | None:
        key = f"{self._prefix}/{rank}"
        try:
            text = self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the process that holds the store is gone
            text = ""
        notes = {int(at): graph for at, _, graph in (note.partition(":") for note in text.split())}
        return notes if 0 < len(notes) < _MOST_NOTES else None

    def _describe(self, at: int, rank: int, first: str, second: str, is_certain: bool) -> str:
        ours, theirs = self._ranks[self._rank], self._ranks[rank]
        what, lines = self._graphs[first]
        other_what, other_lines = self._graphs.get(second, ("unknown graph", ()))
        condition = "" if is_certain else ", if it has come so far and goes on as before"
        return (
            f"ranks run different graphs: as number {at + 1} of their process group, rank {ours} begins a {what} of "
            f"{len(lines)} collectives, and rank {theirs} a {other_what} of {len(other_lines)}{condition}; they "
            f"differ {first_difference((ours, theirs), lines, other_lines)}; let all ranks call the model equally "
            "often and in the same order, for training and for validation"
        )


_orders: WeakKeyDictionary[dist.ProcessGroup, GraphOrder] = WeakKeyDictionary()
_watch_lock = threading.Lock()
_watch: threading.Thread | None = None


class FollowedGraph:
    """A compiled graph that is noted as it begins, and whose errors say where ranks run different graphs."""

    def __init__(self, compiled: Callable[..., Any], places: Sequence[tuple[GraphOrder, str]]) -> None:
        self._compiled = compiled
        self._places = places

    def __call__(self, *args: Any) -> Any:
        for order, graph in self._places:
            order.begin(graph)
        try:
            return self._compiled(*args)
        except CompileFSDPError:
            raise
        except RuntimeError as error:
            if (found := _first_difference_of(order for order, _ in self._places)) is None:
                raise
            raise RanksPartedError(f"{found} (the failed collective: {error})") from error


def follow(compiled: Callable[..., Any], collectives: CollectiveSequence, what: str) -> Callable[..., Any]:
    """Let the errors of a compiled graph name the ranks that run another one.

    Args:
        compiled: The graph.
        collectives: What it issues.
        what: Its name in errors.
    """
    places = []
    for _, group in real_groups(collectives.groups):
        if group not in _orders:
            _orders[group] = GraphOrder(group)
        order = _orders[group]
        places.append((order, order.know(what, shared_lines(collectives, group))))
    if not places:
        return compiled
    _start_watch()
    return FollowedGraph(compiled, places)


def _first_difference_of(orders: Iterable[GraphOrder]) -> str | None:
    return next(filter(None, (order.difference(only_certain=False) for order in orders)), None)


def _start_watch() -> None:
    global _watch
    with _watch_lock:
        if _watch is None:
            _watch = threading.Thread(target=_watch_orders, name="compile_fsdp graph order", daemon=True)
            _watch.start()


def _watch_orders() -> None:
    while True:
        time.sleep(PATIENCE_S)
        for order in list(_orders.values()):
            order.look()
