"""Live bytes of activations in hand-made graphs, and a step under a memory budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp import ops
from compile_fsdp.tools.explain import Report
from compile_fsdp.tools.explain.memory import alive_bytes
from compile_fsdp.tools.explain.names import GraphNames
from compile_fsdp.tools.explain.report import summary_lines
from helpers.graphs.build import GraphBuilder, aten, c10d
from helpers.pages.open_page import OpenPage

ROWS, DIM = 8, 4
SIZE = ROWS * DIM * 4
NAMES = GraphNames({}, {}, {})


def test_forward_holds_results_until_last_read(build: GraphBuilder) -> None:
    x, w = build.input("x", (ROWS, DIM)), build.input("w", (DIM, DIM))
    first = build.call(aten.mm.default, x, w)
    fused = build.call(aten.relu.default, build.call(aten.neg.default, first))
    second = build.call(aten.mm.default, fused, w)
    graph = build.output(build.call(aten.sum.default, second))
    # x, w, mm, neg (fused), relu and its input, mm and its input, sum and its input, output
    found = alive_bytes(graph, NAMES, is_backward=False)
    assert found["activation_bytes"] == [0, 0, SIZE, SIZE, 2 * SIZE, 2 * SIZE, SIZE + 4, 4]
    assert not any(found["recomputed_bytes"])


def test_result_lives_until_last_read_of_its_views(build: GraphBuilder) -> None:
    x, w = build.input("x", (ROWS, DIM)), build.input("w", (ROWS, DIM))
    made = build.call(aten.mm.default, build.call(aten.permute.default, x, [1, 0]), w)
    view = build.call(aten.permute.default, made, [1, 0])
    graph = build.output(build.call(aten.mm.default, made, view))
    assert alive_bytes(graph, NAMES, is_backward=False)["activation_bytes"] == [0, 0, 0, 64, 64, 128, 64]


def test_backward_holds_saved_and_recomputed_activations(build: GraphBuilder) -> None:
    gradient, saved = build.input("gradient", (ROWS, DIM)), build.input("saved", (ROWS, DIM))
    w = build.input("w", (DIM, DIM))
    again = build.call(aten.mm.default, saved, w)
    hidden = build.call(aten.mm.default, gradient, w)
    graph = build.output(build.call(aten.mm.default, build.call(aten.permute.default, hidden, [1, 0]), again))
    found = alive_bytes(graph, NAMES, is_backward=True)
    weight = DIM * DIM * 4
    inputs = 2 * SIZE + weight
    kept = [inputs, inputs, inputs, inputs, SIZE + weight + SIZE, SIZE, SIZE + weight, weight]
    assert found["activation_bytes"] == kept
    assert found["recomputed_bytes"] == [0, 0, 0, SIZE, SIZE, SIZE, SIZE, 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture(scope="module")
def budgeted() -> Report:
    torch._dynamo.reset()
    options = {"memory_budget": 360_000}
    return compile_fsdp.explain(nn.Sequential(Block(), Block()), torch.randn(256, 16), world_size=4, options=options)


def test_report_lists_choices_of_the_memory_budget(budgeted: Report) -> None:
    (decision,) = budgeted.decisions
    assert budgeted.budget_bytes == decision.budget == 360_000
    assert budgeted.peak_bytes < budgeted.allocated_bytes < 360_000
    names = {choice.name for choice in decision.choices}
    assert names & {"run gelu of 0 again", "run linear of 0.up again"}
    assert len(decision.choices) >= len(decision.recomputed) > 0
    assert sum(choice.seconds for choice in decision.choices) == pytest.approx(decision.seconds)
    assert any(each.event.recomputed_bytes for each in budgeted.timeline if each.graph == 1)
    assert not any(each.event.recomputed_bytes for each in budgeted.timeline if each.graph == 0)


def test_summary_shows_memory_budget(budgeted: Report) -> None:
    text = "\n".join(summary_lines(budgeted))
    for expected in ("memory budget", "352 KiB", "computed again", "to fit", "costs", "saves", "again"):
        assert expected in text


def test_page_shows_budget_line_and_choices(budgeted: Report, open_report: Callable[[Report], OpenPage]) -> None:
    opened_budget = open_report(budgeted)
    assert opened_budget.errors == []
    assert opened_budget.count("#memory line.budget") == 1
    assert opened_budget.count("#memory path.part") == 2
    assert "computed again in the backward" in opened_budget.page.locator("#memory").inner_text()
    (decision,) = budgeted.decisions
    assert opened_budget.count("#choices tbody tr:visible") == len(decision.choices)


def test_page_without_budget_has_no_budget_line(opened: OpenPage) -> None:
    assert opened.count("#memory line.budget") == 0
    assert opened.count("#choices tbody tr:visible") == 0


def test_offloaded_tensor_counts_as_host_memory_until_fetched() -> None:
    build = GraphBuilder()
    x, w = build.input("x", (ROWS, DIM)), build.input("w", (DIM, DIM))
    first = build.call(aten.mm.default, x, w)
    away = build.call(ops.offload, first, [], True)
    forward = build.output(build.call(aten.mm.default, x, w), away)
    found = alive_bytes(forward, NAMES, is_backward=False)
    assert found["offloaded_bytes"] == [0, 0, 0, SIZE, SIZE, SIZE]
    assert found["activation_bytes"] == [0, 0, SIZE, SIZE, SIZE, SIZE]

    build = GraphBuilder()
    gradient, saved = build.input("gradient", (ROWS, DIM)), build.input("saved", (ROWS, DIM))
    fetched = build.call(c10d.wait_tensor.default, build.call(ops.fetch, saved, torch.device("cpu")))
    backward = build.output(build.call(aten.mm.default, build.call(aten.permute.default, fetched, [1, 0]), gradient))
    found = alive_bytes(backward, NAMES, is_backward=True)
    product = DIM * DIM * 4
    assert found["offloaded_bytes"] == [SIZE, SIZE, SIZE, 0, 0, 0, 0]
    assert found["activation_bytes"] == [SIZE, SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE + product, product]
    assert not any(found["recomputed_bytes"])
