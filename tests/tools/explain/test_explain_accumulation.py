"""Reports of steps that accumulate gradients over microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.passes.text import format_seconds
from compile_fsdp.tools.explain.capture import capture
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.report import Report, make_report
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.ranks.fake_world import fake_world

WIDTH, ROWS = 64, 32


def _explained(policy: MixedPrecisionPolicy, syncs: tuple[bool, ...], evaluations: int = 0) -> Report:
    """Report on evaluations, and on one backward for each entry, which says whether it reduces gradients."""
    with fake_world(2), capture() as captured:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))
        model = compile_whole(shard_blocks(model, mp_policy=policy))
        with torch.no_grad():
            for _ in range(evaluations):
                model(torch.randn(ROWS, WIDTH))
                model.reshard()
        for syncs_now in syncs:
            model.set_requires_gradient_sync(syncs_now)
            model(torch.randn(ROWS, WIDTH)).sum().backward()
    return make_report(captured, "model", 2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_reductions_of_accumulated_gradients_are_named(dtype: torch.dtype | None) -> None:
    report = _explained(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32), (False, True))
    assert [group.reductions for group in report.groups] == [1, 1]
    names = {each.event.name for each in report.timeline if each.event.kind is Kind.REDUCE}
    assert names and names <= {"0.0", "1.0", "0.0, 1.0"}


def test_graphs_are_numbered_and_each_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    report = _explained(MixedPrecisionPolicy(), (False, True), evaluations=1)
    assert report.graph_names == ["evaluation", "forward", "backward 1", "backward 2"]
    assert all(seconds > 0 for seconds in report.graph_s)
    times = ", ".join(f"{name} {format_seconds(s)}" for name, s in zip(report.graph_names, report.graph_s, strict=True))
    report.print()
    out = capsys.readouterr().out
    assert f"estimated {times} communication" in " ".join(out.split())
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line]
    assert ["graphs", "1 evaluation, 1 forward, 2 backward"] in lines
    (group,) = (each[1] for each in lines if each[0] == "1")
    assert [group.count(kind) for kind in ("evaluation", "forward", "backward")] == [1, 1, 1]


def test_backward_without_reductions_holds_activations() -> None:
    report = _explained(MixedPrecisionPolicy(), (False,))
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]
    backward = [each for each in report.timeline if each.graph == 1]
    assert backward[0].event.activation_bytes >= ROWS * WIDTH * 4  # the activation that the forward saved
