"""Report to the user on compiled graphs, including cached graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.passes.report import Report, WindowReport
from compile_fsdp.passes.runner import take_graph_notes
from compile_fsdp.reports import GraphReport, record


class Recorder:
    """Reports one Dynamo graph from the reports of its passes; the inner backend may compile it as several graphs.

    `unchanged` is the report of the Dynamo graph if no pass changes it.
    """

    def __init__(self, unchanged: GraphReport) -> None:
        self._next = unchanged
        self.reports: list[GraphReport] = []
        take_graph_notes()  # drops notes of a backward that Inductor compiled by itself, later than its forward

    def __call__(self, passes: Sequence[Report]) -> None:
        """Report a graph on which the passes have run."""
        self._record(passes, cached=False)

    def finish(self) -> CollectiveSequence | None:
        """Report graphs that no pass has seen, from Inductor's cache or a different inner backend.

        Returns the collectives that the graph issues; None if an inner backend without the passes decides on them.
        """
        notes = take_graph_notes()
        if not self.reports:
            for reports, _ in notes:
                self._record(reports, cached=True)
        if not self.reports:
            self._record((), cached=self._next.inner_backend == "inductor")
        return next((collectives for _, collectives in notes), None)

    def _record(self, passes: Sequence[Report], cached: bool) -> None:
        windows = [p for p in passes if isinstance(p, WindowReport)]
        report = replace(
            self._next,
            windows_removed=sum(p.windows_removed for p in windows),
            copies_removed=sum(p.copies_removed for p in windows),
            resizes_removed=sum(p.resizes_removed for p in windows),
            kept=tuple((fqn, reason.value) for p in windows for fqn, reason in p.kept),
            nodes_before=passes[0].nodes_before if passes else self._next.nodes_before,
            nodes_after=passes[-1].nodes_after if passes else self._next.nodes_after,
            seconds=sum(p.seconds for p in passes),
            cached=cached,
        )
        record(report)
        self.reports.append(report)
        # Inductor compiles the backward of a graph without sharded modules by itself, as a second graph.
        self._next = replace(self._next, direction="backward", decision=None, groups=())
