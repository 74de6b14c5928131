"""The pipeline as Inductor uses it: order, reports, cache key, and a compiled function."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_fsdp.compat import CustomGraphPass
from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import PASSES, PassReport, Pipeline, pipeline
from compile_fsdp.passes.remove_unshard_copies import node_name
from execution import freed
from graphs import one_window

ALL_DISABLED = frozenset(p.__name__ for p in PASSES)


def ignore(reports: tuple[PassReport, ...]) -> None:
    pass


def test_passes_run_in_order_and_report(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[tuple[PassReport, ...]] = []
    with caplog.at_level(logging.INFO, "compile_fsdp.passes"):
        Pipeline(node_name, reports.append)(one_window(numel=8, dtype=torch.float32))
    (report,) = reports
    assert [r.name for r in report] == [p.__name__ for p in PASSES]
    assert all(r.seconds > 0 for r in report)
    assert caplog.messages[0] == "remove_unshard_copies: 1 of 1 windows removed, 3.05e-05 MiB"


def test_disabled_pass_does_not_run() -> None:
    reports: list[tuple[PassReport, ...]] = []
    graph = one_window(numel=8, dtype=torch.float32)
    Pipeline(node_name, reports.append, ALL_DISABLED)(graph)
    assert reports == [()]
    assert len(graph.nodes) == 9


def test_unknown_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected disabled passes among .*remove_unshard_copies.*typo"):
        Pipeline(node_name, ignore, frozenset({"typo"}))


def test_uuid_depends_on_sources_and_options_only(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = Pipeline(node_name, ignore).uuid()
    assert Pipeline(lambda node: "other", print).uuid() == uuid
    assert Pipeline(node_name, ignore, ALL_DISABLED).uuid() != uuid
    assert Pipeline(node_name, ignore, cpu_backend="gloo").uuid() != uuid
    monkeypatch.setattr(pipeline, "_hash_sources", lambda: "other sources")
    assert Pipeline(node_name, ignore).uuid() != uuid


def test_uuid_is_the_same_in_another_process() -> None:
    code = "from compile_fsdp.passes import Pipeline; print(Pipeline(str, print, frozenset(NAMES)).uuid())"
    code = code.replace("NAMES", repr(sorted(ALL_DISABLED)))
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == Pipeline(node_name, ignore, ALL_DISABLED).uuid()


def test_pipeline_pickles() -> None:
    custom_pass = Pipeline(node_name, ignore, ALL_DISABLED)
    assert isinstance(custom_pass, CustomGraphPass)
    assert pickle.loads(pickle.dumps(custom_pass)).uuid() == custom_pass.uuid()


def test_inductor_compiles_without_the_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # From a cache that others have filled, the graph would come without a run of the pass.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    targets: list[object] = []
    reports: list[tuple[PassReport, ...]] = []

    class Recording(Pipeline):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            targets.extend(node.target for node in graph.nodes)

    def step(weight: torch.Tensor, shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for scale in (2, 3):
            gathered = torch.cat([shard, shard * scale])
            resize_storage_bytes_(weight, 64)
            copy_(weight, gathered)
            x = torch.relu(x @ weight.t())
            resize_storage_bytes_(weight, 0)
        return x

    options = {"post_grad_custom_pre_pass": Recording(node_name, reports.append)}
    inputs = (freed(4, 4), torch.randn(2, 4), torch.randn(3, 4))
    with torch.no_grad():
        expected = step(*inputs)
        compiled = torch.compile(step, backend="inductor", fullgraph=True, options=options)
        torch.testing.assert_close(compiled(*inputs), expected)
    assert inputs[0].untyped_storage().nbytes() == 0
    assert copy_ not in targets and resize_storage_bytes_ not in targets
    assert reports[0][0].windows_removed == 2
