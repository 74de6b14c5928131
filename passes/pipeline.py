"""The passes in their order, as the one custom pass that Inductor runs before its own post-grad passes.

They do not run on a graph that Inductor takes from its cache; what they have to say is stored with it, as a note.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import fx

from compile_fsdp import ops
from compile_fsdp.compat import CustomGraphPass, leave_note, take_notes, trace_artifact
from compile_fsdp.passes.check import checking
from compile_fsdp.passes.costs import Costs
from compile_fsdp.passes.exchange_pairs import exchange_pairs
from compile_fsdp.passes.named_collectives import use_named_collectives, use_torch_collectives
from compile_fsdp.passes.pack_gathers import pack_gathers
from compile_fsdp.passes.pack_reductions import pack_reductions
from compile_fsdp.passes.remove_unread import remove_unread
from compile_fsdp.passes.remove_unshard_copies import Names, remove_unshard_copies
from compile_fsdp.passes.report import Report, from_json, to_json
from compile_fsdp.passes.schedule_collectives import schedule_collectives
from compile_fsdp.passes.sequence import CollectiveSequence, read_collectives

Pass = Callable[..., Report]
OnReport = Callable[[tuple[Report, ...]], None]

PASSES: tuple[Pass, ...] = (
    # First: while parameters are copied into, every read of one depends on a mutation, and no other pass may
    # move it; afterwards the graph is functional in them.
    remove_unshard_copies,
    # Then the collectives as they are to be issued, and last their order.
    remove_unread,
    pack_gathers,
    pack_reductions,
    schedule_collectives,
    # How gloo carries them: behind everything that knows a collective when it sees one, observers too.
    exchange_pairs,
)

_log = logging.getLogger("compile_fsdp.passes")


class GraphObserver(Protocol):
    """Looks at a graph before, between and after the passes, and leaves it as it is."""

    def start(self, graph: fx.Graph) -> None:
        """No pass has run yet. Called again for another graph that the same pipeline gets."""

    def after(self, graph: fx.Graph, report: Report) -> None:
        """A pass has run."""

    def end(self, graph: fx.Graph) -> None:
        """All passes have run but `exchange_pairs`, which it does not see."""


@dataclass(frozen=True, slots=True)
class GraphNote:
    """What is stored with a graph.

    Attributes:
        reports: Of the passes, in their order.
        collectives: What the graph issues.
    """

    reports: tuple[Report, ...]
    collectives: CollectiveSequence


def take_graph_notes() -> list[GraphNote]:
    """The notes of all graphs that were compiled, or came from a cache, since the last call."""
    return [_parse_note(*json.loads(text)) for text in take_notes()]


def _parse_note(reports: str, collectives: dict[str, list[str]]) -> GraphNote:
    sequence = CollectiveSequence(tuple(collectives["lines"]), tuple(collectives["groups"]))
    return GraphNote(from_json(reports), sequence)


class Pipeline(CustomGraphPass):
    """Runs `PASSES` on a post-grad graph. Set it as Inductor's `post_grad_custom_pre_pass`.

    Args:
        names: Parameter FQN of a placeholder. Only reports use it, so it is no part of `uuid()`.
        on_report: Called once per graph, with the reports in the order the passes ran.
        disabled: Names of passes to leave out.
        hoist: See `schedule_collectives`.
        merge: See `pack_gathers` and `pack_reductions`.
        costs: The numbers by which passes decide, in place of those for the device.
        observer: Sees each graph. What Inductor takes from its cache passes it by.
        check: Whether to look for faults after every pass, see `passes/check.py`.
        cpu_backend: What carries collectives on the CPU in this process, by which `exchange_pairs` decides. Another
            process may have put the same graph into a cache.
    Raises:
        ValueError: `disabled` names a pass that does not exist.
        VerificationError: when called, a pass has made a fault.
    """

    def __init__(
        self,
        names: Names,
        on_report: OnReport,
        disabled: frozenset[str] = frozenset(),
        *,
        hoist: bool = True,
        merge: bool = False,
        costs: Costs | None = None,
        observer: GraphObserver | None = None,
        check: bool = False,
        cpu_backend: str | None = None,
    ) -> None:
        known = [p.__name__ for p in PASSES]
        if unknown := sorted(disabled.difference(known)):
            raise ValueError(f"expected disabled passes among {known}, got {unknown}; see docs/passes.md")
        self._on_report = on_report
        self._observer = observer
        self._check = check
        self._disabled = disabled
        self._arguments: dict[Pass, dict[str, object]] = {
            remove_unshard_copies: {"names": names},
            remove_unread: {},
            pack_gathers: {"merge": merge, "costs": costs},
            pack_reductions: {"merge": merge, "costs": costs},
            schedule_collectives: {"hoist": hoist, "costs": costs},
            exchange_pairs: {},
        }
        self._key = {"disabled": sorted(disabled), "hoist": hoist, "merge": merge, "costs": repr(costs)}
        self._key["cpu_backend"] = cpu_backend

    def __call__(self, graph: fx.Graph) -> None:
        use_torch_collectives(graph)
        if self._observer is not None:
            self._observer.start(graph)
        *observed, last = PASSES
        reports = tuple(self._run(p, graph, self._observer) for p in observed if p.__name__ not in self._disabled)
        graph.lint()
        if self._observer is not None:
            self._observer.end(graph)
        if last.__name__ not in self._disabled:
            reports += (self._run(last, graph, None),)
        use_named_collectives(graph)
        for report in reports:
            _log.info("%s", report)
        text = to_json(reports)
        leave_note(json.dumps([text, asdict(read_collectives(graph))]))
        trace_artifact("compile_fsdp_passes", lambda: text)
        self._on_report(reports)

    def uuid(self) -> str:
        """Changes with any source file of `passes/` and `ops/` and with the options, with nothing else."""
        text = json.dumps({"sources": _hash_sources(), **self._key})
        return hashlib.sha256(text.encode()).hexdigest()

    def _run(self, run: Pass, graph: fx.Graph, observer: GraphObserver | None) -> Report:
        with checking(graph, run.__name__) if self._check else nullcontext():
            start = time.perf_counter()
            report = run(graph, **self._arguments[run])
            report = replace(report, seconds=time.perf_counter() - start)
        if observer is not None:
            observer.after(graph, report)
        return report


@functools.cache
def _hash_sources() -> str:
    """The hash of the code that runs; computed once, since the code does not change when a file does."""
    digest = hashlib.sha256()
    for name, folder in (("ops", Path(ops.__path__[0])), ("passes", Path(__file__).parent)):
        for path in sorted(folder.glob("**/*.py")):
            content = path.read_bytes()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
