"""Run lists of passes from `pipelines.py`, and keep their results.

Passes on post-grad graphs run as the single custom pass that Inductor runs before its own passes. They do not run on a
graph that Inductor takes from its cache; their reports are stored with the graph as a note.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import fx

from compile_fsdp.passes.analysis.check import checking
from compile_fsdp.passes.analysis.sequence import CollectiveSequence, read_collectives
from compile_fsdp.passes.cache_key import cache_key
from compile_fsdp.passes.report import Report, from_json, to_json
from compile_fsdp.torch_compat.dynamo import dynamo_counters, trace_artifact
from compile_fsdp.torch_compat.inductor import CustomGraphPass

# A function of the graph, with its remaining arguments bound.
Pass = Callable[[fx.Graph], object]
PostGradPass = Callable[[fx.Graph], Report]

_log = logging.getLogger("compile_fsdp.passes")

_NOTE = "compile_fsdp "  # Prefix that tells notes from the names of Inductor's counts.


def function_of(each: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a pass without its bound arguments."""
    return each.func if isinstance(each, partial) else each


def run_passes(graph: fx.Graph, passes: Iterable[Pass]) -> dict[Callable[..., object], Any]:
    """Run passes on a Dynamo graph, in order; return the result of each by its function."""
    return {function_of(each): each(graph) for each in passes}


class GraphObserver(Protocol):
    """Observer of a graph before, between and after passes; it changes nothing."""

    def start(self, graph: fx.Graph) -> None:
        """Called before the first pass, for every graph of the pipeline."""

    def after(self, graph: fx.Graph, report: Report) -> None:
        """Called after each pass."""

    def end(self, graph: fx.Graph) -> None:
        """Called after the last pass."""


def take_graph_notes() -> list[tuple[tuple[Report, ...], CollectiveSequence]]:
    """Return the reports and collectives of graphs compiled or taken from a cache since the last call, each once.

    Inductor stores the counts of a compilation, and counts them again if the graph comes from a cache. So a note is the
    name of a count. (counters["inductor"], CompiledFxGraph.counter_deltas: checked on 2.13.0)
    """
    counts, notes = dynamo_counters["inductor"], []
    for name in [name for name in counts if name.startswith(_NOTE)]:
        del counts[name]
        reports, calls = json.loads(name.removeprefix(_NOTE))
        notes.append((from_json(reports), CollectiveSequence(tuple((text, group) for text, group in calls))))
    return notes


class Pipeline(CustomGraphPass):
    """Run passes on a post-grad graph, as Inductor's `post_grad_custom_pre_pass`.

    Args:
        passes: See `pipelines.post_grad`. A bound argument that is a function names things in reports, and is not part
            of `uuid()`.
        on_report: Called once per graph, with the reports in the order the passes ran.
        disabled: Names of passes to leave out.
        observer: Sees each graph that the passes run on, so no graph from Inductor's cache.
        check: Whether to look for faults after every pass; see `analysis/check.py`.
        applies: Whether the passes run on a graph; on all if None.
    Raises:
        ValueError: `disabled` names a pass that is not in the list.
        VerificationError: A pass has made a fault. Calling the pipeline raises it.
    """

    def __init__(
        self,
        passes: Sequence[PostGradPass],
        on_report: Callable[[tuple[Report, ...]], None],
        disabled: frozenset[str] = frozenset(),
        *,
        observer: GraphObserver | None = None,
        check: bool = False,
        applies: Callable[[fx.Graph], bool] | None = None,
    ) -> None:
        known = list(map(_name, passes))
        if unknown := sorted(disabled.difference(known)):
            raise ValueError(f"expected disabled passes among {known}, got {unknown}; see docs/passes.md")
        self._passes = [each for each in passes if _name(each) not in disabled]
        self._on_report = on_report
        self._observer = observer
        self._check = check
        self._applies = applies

    def __call__(self, graph: fx.Graph) -> None:
        if self._applies is not None and not self._applies(graph):
            return
        if self._observer is not None:
            self._observer.start(graph)
        reports = tuple(self._run(each, graph) for each in self._passes)
        graph.lint()
        if self._observer is not None:
            self._observer.end(graph)
        for report in reports:
            _log.info("%s", report)
        text = to_json(reports)
        dynamo_counters["inductor"][_NOTE + json.dumps([text, read_collectives(graph).calls])] += 1
        trace_artifact("compile_fsdp_passes", lambda: text)
        self._on_report(reports)

    def uuid(self) -> str:
        """Return a cache key of the passes, their arguments, and the sources that `cache_key` hashes."""
        return cache_key(*((_name(each), _options(each)) for each in self._passes))

    def __deepcopy__(self, memo: object) -> Pipeline:
        """Return this object, because torch copies Inductor's options to compile the body of a scan."""
        return self

    def _run(self, each: PostGradPass, graph: fx.Graph) -> Report:
        with checking(graph, _name(each)) if self._check else nullcontext():
            start = time.perf_counter()
            report = each(graph)
            report = replace(report, seconds=time.perf_counter() - start)
        if self._observer is not None:
            self._observer.after(graph, report)
        return report


def _name(each: Pass) -> str:
    return function_of(each).__name__


def _options(each: Pass) -> dict[str, object]:
    bound = each.keywords if isinstance(each, partial) else {}
    return {name: value for name, value in bound.items() if not callable(value)}
