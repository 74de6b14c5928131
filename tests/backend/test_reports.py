"""`compile_fsdp.reports()` and log lines of a compiled step on one rank of a fake world."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from helpers.graphs.capture import without_graph_caches
from helpers.logs import logged
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.check import build, loss_of
from helpers.ranks.fake_world import fake_world


def _step(options: dict[str, Any], backward: bool = True) -> tuple[list[compile_fsdp.GraphReport], list[str]]:
    compile_fsdp.reset_reports()  # drop reports of earlier tests
    with logged(logging.INFO) as lines, fake_world(2), without_graph_caches():
        case = build("mlp", compile_fsdp.fully_shard)
        case.model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        loss = loss_of(case.model, case.batch())
        if backward:
            loss.backward()
    reports = list(compile_fsdp.reports())
    compile_fsdp.reset_reports()
    assert compile_fsdp.reports() == ()
    return reports, lines


def test_windows_are_removed_for_blocks_and_kept_for_the_root() -> None:
    (forward, backward), lines = _step({})
    # Two blocks have seven parameters each; the root's four stay unsharded from forward to backward.
    root = {"inp.weight", "inp.bias", "out.weight", "out.bias"}
    for report, direction, reason in ((forward, "forward", "open at return"), (backward, "backward", "open at start")):
        assert (report.direction, report.inner_backend, report.cached) == (direction, "inductor", False)
        assert (report.windows_removed, report.copies_removed, report.resizes_removed) == (14, 14, 28)
        # All groups share one pack, where the forward had three, and the backward two and three. The backward reads
        # neither six biases (an item and a view each) nor the empty buffers of four gradients of the root.
        assert report.nodes_before - report.nodes_after == 42 + (10 if direction == "forward" else 15 + 12 + 4)
        assert {fqn for fqn, _ in report.kept} == root
        assert {why for _, why in report.kept} == {reason}
        assert report.seconds > 0
    assert sum("14 windows removed" in line for line in lines) == 2, lines


def test_body_of_an_op_is_no_graph_of_its_own() -> None:
    compile_fsdp.reset_reports()

    @torch.compile(backend="compile_fsdp", fullgraph=True)
    def run(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with without_graph_caches():
        run(torch.ones(3))
    assert [report.direction for report in compile_fsdp.reports()] == ["forward"]


def test_windows_are_removed_where_a_checkpoint_saves_states_of_random_numbers() -> None:
    class Draws(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: dropout(super(Draws, self).forward(x)), x, use_reentrant=False)

    compile_fsdp.reset_reports()
    with fake_world(2), without_graph_caches():
        model = compile_whole(shard_blocks(torch.nn.Sequential(Draws(8, 8), Draws(8, 8))), bundle=False)
        model(torch.ones(4, 8)).sum().backward()
    assert [report.windows_removed for report in compile_fsdp.reports()] == [4, 4]


def test_disabled_pass_does_not_run() -> None:
    (forward,), _ = _step({"disabled_passes": {"remove_unshard_copies"}}, backward=False)
    assert forward.windows_removed == 0
    assert forward.nodes_before - forward.nodes_after == 10  # two of three packs


def test_aot_eager_reports_contain_no_pass_results() -> None:
    (forward, backward), _ = _step({"inner_backend": "aot_eager"})
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.inner_backend == "aot_eager"
    assert (forward.windows_removed, forward.kept, forward.cached) == (0, (), False)
