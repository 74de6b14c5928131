"""Observers of the post-grad passes."""

from __future__ import annotations

import pytest
from torch import fx

from compile_fsdp.passes import PASSES, Pipeline, pipelines
from compile_fsdp.passes.report import PassCounts, WindowReport, node_name
from compile_fsdp.passes.runner import PostGradPass
from compile_fsdp.reports import observing, present_observer
from helpers.graphs.build import one_window


def _passes() -> tuple[PostGradPass, ...]:
    return pipelines.post_grad(node_name, hoist=True, costs=None)


class Notes:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def start(self, graph: fx.Graph) -> None:
        self.seen.append(("start", len(graph.nodes)))

    def after(self, graph: fx.Graph, report: WindowReport | PassCounts) -> None:
        assert len(graph.nodes) == report.nodes_after
        self.seen.append((report.name, report.nodes_after))

    def end(self, graph: fx.Graph) -> None:
        self.seen.append(("end", len(graph.nodes)))


def test_observer_is_called_before_between_and_after_passes() -> None:
    notes = Notes()
    graph = one_window()
    nodes = len(graph.nodes)
    Pipeline(_passes(), lambda reports: None, observer=notes)(graph)
    assert [name for name, _ in notes.seen] == ["start", *(each.__name__ for each in PASSES), "end"]
    assert notes.seen[0][1] == nodes and notes.seen[1][1] == nodes - 3 == notes.seen[-1][1]


def test_observer_does_not_change_cache_key() -> None:
    plain = Pipeline(_passes(), lambda reports: None)
    watched = Pipeline(_passes(), lambda reports: None, observer=Notes())
    assert plain.uuid() == watched.uuid()


def test_observer_is_removed_when_its_block_ends_or_raises() -> None:
    first, second = object(), object()
    with observing(first):  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError), observing(second):  # type: ignore[arg-type]
            assert present_observer() is second
            raise ZeroDivisionError
        assert present_observer() is first
    assert present_observer() is None
