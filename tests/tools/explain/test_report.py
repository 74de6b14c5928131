"""Contents of the report of a compiled step."""

from __future__ import annotations

import json

from compile_fsdp.tools.explain import Report
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.report import summary_lines
from helpers.models.explained import HOSTILE, WORLD, Model

BLOCK_BYTES = 2 * 2 * WORLD * 4 * 4
ROOT_BYTES = (8 * 4 + 8) * 4


def test_report_round_trips_through_json(report: Report) -> None:
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["world_size"] == WORLD
    assert data["figures"]["peak_bytes"] == report.peak_bytes > 0
    assert [graph["kind"] for graph in data["graphs"]] == ["forward", "backward"]


def test_groups_list_collectives_and_windows(report: Report) -> None:
    rows = {row.facts.name: row for row in report.groups}
    assert list(rows) == ["blocks.0", "blocks.1", "the root"]
    for name in ("blocks.0", "blocks.1"):
        row = rows[name]
        assert set(row.facts.parameters) == {f"{name}.up.weight", f"{name}.gate.weight"}
        assert row.facts.ranks == WORLD and row.facts.reshards
        assert (row.windows, row.windows_removed, row.kept) == (4, 4, ())
        # The first block's backward computes no input gradient, so it reads no parameters.
        directions = ["forward"] if name == "blocks.0" else ["forward", "backward"]
        assert [report.graphs[use.graph].kind for use in row.uses] == directions
        assert (row.gathers, row.reductions) == (len(directions), 1)
        assert row.uses[0].first[0].startswith(name) and row.uses[0].first[1] < row.uses[0].last[1]
        assert all(use.prefetch_events is not None for use in row.uses)
    root = rows["the root"]
    assert not root.facts.reshards and root.gathers == 1
    assert root.windows_removed == 0 and root.windows == 2
    assert set(root.kept) == {
        (f"{HOSTILE}.{name}", reason) for name in ("weight", "bias") for reason in ("open at return", "open at start")
    }


def test_every_collective_has_a_name_and_parameters(report: Report) -> None:
    launches = [each.event for each in report.timeline if each.event.kind in (Kind.GATHER, Kind.REDUCE)]
    parameters = {fqn for row in report.groups for fqn in row.facts.parameters}
    for kind in (Kind.GATHER, Kind.REDUCE):
        carried = [event.parameters for event in launches if event.kind is kind]
        assert all(carried)
        assert {fqn for each in carried for fqn in each} == parameters
    assert all(event.size_bytes > 0 for event in launches)


def test_every_event_has_the_name_of_a_module(report: Report) -> None:
    modules = {fqn or "the root" for fqn, _ in Model().named_modules()}
    assert {name for each in report.timeline for name in each.event.name.split(", ")} <= modules


def test_forward_modules_are_in_execution_order(report: Report) -> None:
    forward = [each for each in report.timeline if each.graph == 0 and each.event.kind is Kind.COMPUTE]
    names = list(dict.fromkeys(each.event.name for each in forward))
    order = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "gate")]
    assert [name for name in names if name in order] == order
    assert HOSTILE in names


def test_memory_counts_gathered_parameters(report: Report) -> None:
    at_end = [each for each in report.timeline if each.graph == 0][-1]
    assert at_end.event.alive_bytes == ROOT_BYTES  # the root stays unsharded for the backward
    assert BLOCK_BYTES / 2 < report.peak_bytes < 4 * BLOCK_BYTES
    assert report.timeline[-1].event.alive_bytes <= ROOT_BYTES
    block = max(row.facts.unsharded_bytes for row in report.groups)
    assert report.eager_peak_bytes == 3 * block  # a block, its gather, and the gather of the next block
    assert report.shard_bytes == sum(row.facts.shard_bytes for row in report.groups)


def test_exposed_times_and_step_time_add_up(report: Report) -> None:
    waits = [each for each in report.timeline if each.event.kind is Kind.WAIT]
    assert report.exposed_s == sum(each.exposed_s for each in waits) > 0
    assert all(each.exposed_s == 0 for each in report.timeline if each.event.kind is not Kind.WAIT)
    starts = [each.at_s for each in report.timeline]
    assert starts == sorted(starts) and starts[0] == 0
    last, total = report.timeline[-1], sum(report.graph_s)
    assert abs(last.at_s + last.exposed_s - total) < 1e-9 + last.event.seconds


def test_the_summary_names_groups_figures_and_reasons(report: Report) -> None:
    text = "\n".join(summary_lines(report))
    for part in ("Model on 1024 ranks", "blocks.1", "the root", "open at return", "4 of 4", "exposed"):
        assert part in text
