"""Name the rank that runs a different graph than its peers.

`agree` compares graphs before they first run. Later, a rank may still run a graph that its peers do not run at that
time, for example because only this rank validates. Its collectives then fail, or wait until a timeout ends the job, and
torch's error names neither the graph nor the rank. So each rank notes in the process group's store which graph it
begins, and errors are explained from the notes of all ranks.

[Note: Steady steps note nothing]
A training loop repeats its graphs in every step. Each rank predicts its next graph from the period of its last graphs,
and writes a note only if it begins a different graph. A reader of the notes makes equal predictions, so the notes
determine all graphs in their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from compile_fsdp.backend.agreement import first_difference, hash_lines, real_groups, shared_lines
from compile_fsdp.errors import RanksPartedError
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.torch_compat.distributed import group_store

PATIENCE_S = 60.0  # a rank that begins no graph for so long compares its graphs with its peers'
_READING_S = 10.0  # time limit for reading the notes of all ranks
_WINDOW = 512  # number of last graphs that are searched for a period
_MOST_NOTES = 256  # a rank with so many notes has no period, and is not followed further

_log = logging.getLogger("compile_fsdp")


class Prediction:
    """Predicts a rank's next graph from its last graphs.

    The predicted graph is the successor of the longest earlier series that equals the last graphs.
    """

    def __init__(self) -> None:
        self.count = 0  # number of graphs begun so far
        self._begun: list[str] = []
        self._period = 0

    @property
    def next(self) -> str | None:
        """The predicted graph; None if there is no prediction."""
        return self._begun[-self._period] if self._period else None

    def add(self, graph: str) -> bool:
        """Add the next graph; return whether it was predicted."""
        is_predicted = graph == self.next
        self._begun.append(graph)
        self.count += 1
        if not is_predicted:
            self._period = self._find_period()
        if len(self._begun) > 2 * _WINDOW:
            del self._begun[:-_WINDOW]
        return is_predicted

    def _find_period(self) -> int:
        """Return the distance to the longest series equal to the last graphs; 0 if there is none.

        Of equally long series the earliest counts, because it is at the begin of a step.
        """
        window = self._begun[-_WINDOW:]
        longest = best = 0
        for period in range(1, len(window)):
            pairs = zip(reversed(window), reversed(window[:-period]), strict=False)
            length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(window) - period)
            if length and length >= longest:
                longest, best = length, period
        return best


class GraphOrder:
    """Graphs that this rank and, by their notes, its peers in a process group have begun."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._store = group_store(group)
        # A process group that is destroyed and created again may get its old store.
        again = (self._store.add("compile_fsdp/order/arrivals", 1) - 1) // group.size()
        self._prefix = f"compile_fsdp/order/{again}"
        self._graphs: dict[str, tuple[str, Sequence[str]]] = {}
        self._own = Prediction()
        self._notes: dict[int, str] = {}
        self._is_followed = True
        self._looked_at = 0

    def know(self, what: str, lines: Sequence[str]) -> str:
        """Add a graph by its name and collectives; return its key in notes."""
        digest = hash_lines(lines)[:12]
        self._graphs.setdefault(digest, (what, lines))
        return digest

    def begin(self, graph: str) -> None:
        """Begin a graph on this rank; note it if it was not predicted."""
        if not self._is_followed or self._own.add(graph):
            return
        self._notes[self._own.count - 1] = graph
        self._is_followed = len(self._notes) < _MOST_NOTES
        try:
            text = " ".join(f"{at}:{noted}" for at, noted in self._notes.items())
            self._store.set(f"{self._prefix}/{self._rank}", text)
        except RuntimeError as error:
            self._is_followed = False
            _log.debug("graphs are not noted any more: %s", error)

    def difference(self, only_certain: bool) -> str | None:
        """Describe where a peer's graphs differ from this rank's; None if nowhere.

        `only_certain` ignores a difference behind a peer's last note, where its graph is only predicted.
        """
        if not self._is_followed:
            return None
        end = time.monotonic() + _READING_S
        for rank in range(len(self._ranks)):
            is_peer = rank != self._rank and time.monotonic() < end
            if is_peer and (found := self._compare(rank, only_certain)) is not None:
                return found
        return None

    def look(self) -> None:
        """Log an error if this rank seems to wait for diverging ranks."""
        count = self._own.count
        is_new, self._looked_at = count != self._looked_at, count
        # Only if no graph has begun since the last look.
        if not is_new and count and (found := self.difference(only_certain=True)) is not None:
            _log.error("no graph has begun for %g s, and %s", PATIENCE_S, found)

    def _compare(self, rank: int, only_certain: bool) -> str | None:
        if (notes := self._read(rank)) is None:
            return None
        last = max(notes)
        own, other = Prediction(), Prediction()
        for at in range(self._own.count):
            first, second = self._notes.get(at, own.next), notes.get(at, other.next)
            if second is None:
                return None  # nothing is noted or predicted so far ahead
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


def note_runs(compiled: Callable[..., Any], places: Sequence[tuple[GraphOrder, str]]) -> Callable[..., Any]:
    """Let a compiled graph note its runs and explain diverging ranks."""

    def run(*args: Any) -> Any:
        for order, graph in places:
            order.begin(graph)
        try:
            return compiled(*args)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's errors have no type of their own
                for order, _ in places:
                    if (found := order.difference(only_certain=False)) is not None:
                        raise RanksPartedError(f"{found} (the failed collective: {error})") from error
            raise

    return run


def follow(compiled: Callable[..., Any], collectives: CollectiveSequence, what: str) -> Callable[..., Any]:
    """Let the errors of a compiled graph name diverging ranks; `what` is the graph's name in errors."""
    places = []
    for group in real_groups(collectives.groups):
        if group not in _orders:
            _orders[group] = GraphOrder(group)
        order = _orders[group]
        places.append((order, order.know(what, shared_lines(collectives, group))))
    if not places:
        return compiled
    _start_watch()
    return note_runs(compiled, places)


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
