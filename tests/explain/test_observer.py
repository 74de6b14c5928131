"""Who looks on while the passes run, and what it costs where nobody does."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from compile_fsdp.passes import PASSES, Pipeline
from compile_fsdp.passes.remove_unshard_copies import node_name
from compile_fsdp.passes.report import CountReport, PassReport
from compile_fsdp.reports import observing, present_observer
from graphs import one_window


class Notes:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def start(self, graph: fx.Graph) -> None:
        self.seen.append(("start", len(graph.nodes)))

    def after(self, graph: fx.Graph, report: PassReport | CountReport) -> None:
        assert len(graph.nodes) == report.nodes_after
        self.seen.append((report.name, report.nodes_after))

    def end(self, graph: fx.Graph) -> None:
        self.seen.append(("end", len(graph.nodes)))


def test_an_observer_sees_the_graph_before_between_and_after_the_passes() -> None:
    notes = Notes()
    graph = one_window(numel=8, dtype=torch.float32)
    nodes = len(graph.nodes)
    Pipeline(node_name, lambda reports: None, observer=notes)(graph)
    *observed, _ = PASSES  # the last one hides from it what the collectives are
    assert [name for name, _ in notes.seen] == ["start", *(each.__name__ for each in observed), "end"]
    assert notes.seen[0][1] == nodes and notes.seen[1][1] == nodes - 3 == notes.seen[-1][1]


def test_an_observer_changes_no_cache_key() -> None:
    plain = Pipeline(node_name, lambda reports: None)
    watched = Pipeline(node_name, lambda reports: None, observer=Notes())
    assert plain.uuid() == watched.uuid()


def test_observation_ends_with_its_block_also_on_errors() -> None:
    first, second = object(), object()
    with observing(first):  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError), observing(second):  # type: ignore[arg-type]
            assert present_observer() is second
            raise ZeroDivisionError
        assert present_observer() is first
    assert present_observer() is None
