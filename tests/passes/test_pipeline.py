"""The pipeline as Inductor uses it: order, reports, cache key, and a compiled function."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compile_fsdp
from compile_fsdp.backend.derived_backward import Partitioner
from compile_fsdp.passes import COSTS, PASSES, Costs, Pipeline, WindowReport, cache_key, pipelines
from compile_fsdp.passes.post_grad.packing import Merge
from compile_fsdp.passes.report import Names, node_name
from compile_fsdp.passes.runner import PostGradPass
from compile_fsdp.torch_compat.inductor import CustomGraphPass
from helpers.graphs.build import one_window

ALL_DISABLED = frozenset(p.__name__ for p in PASSES)


def passes(
    names: Names = node_name, hoist: bool = True, merge: Merge = Merge.SMALL, costs: Costs | None = None
) -> tuple[PostGradPass, ...]:
    return pipelines.post_grad(names, hoist=hoist, merge=merge, costs=costs)


def ignore(reports: tuple[WindowReport, ...]) -> None:
    pass


def test_passes_run_in_order_and_report(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[tuple[WindowReport, ...]] = []
    with caplog.at_level(logging.INFO, "compile_fsdp.passes"):
        Pipeline(passes(), reports.append)(one_window())
    (report,) = reports
    assert [r.name for r in report] == [p.__name__ for p in PASSES]
    assert all(r.seconds > 0 for r in report)
    assert caplog.messages[0] == "remove_unshard_copies: 1 of 1 windows removed, 32 B"


def test_disabled_pass_does_not_run() -> None:
    reports: list[tuple[WindowReport, ...]] = []
    graph = one_window()
    Pipeline(passes(), reports.append, ALL_DISABLED)(graph)
    assert reports == [()]
    assert len(graph.nodes) == 9


def test_unknown_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected disabled passes among .*remove_unshard_copies.*typo"):
        Pipeline(passes(), ignore, frozenset({"typo"}))


def test_uuid_depends_on_sources_and_options_only(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = Pipeline(passes(), ignore).uuid()
    assert Pipeline(passes(lambda node: "other"), print).uuid() == uuid
    assert Pipeline(passes(), ignore, ALL_DISABLED).uuid() != uuid
    for other in (passes(hoist=False), passes(merge=Merge.ALL), passes(costs=COSTS["cpu"])):
        assert Pipeline(other, ignore).uuid() != uuid
    monkeypatch.setattr(cache_key, "hash_sources", lambda: "other sources")
    assert Pipeline(passes(), ignore).uuid() != uuid


# By file, code that decides about a graph, and its replacement.
DECIDING = {
    "ops/collectives.py": ('("sum", "avg")', '("sum",)'),
    "passes/pipelines.py": ("        replace_unsafe_gathers,\n", ""),
    "passes/cache_key.py": ('"ops", "passes"', '"passes", "ops"'),
    "passes/analysis/costs.py": ("latency=1e-3", "latency=1e-2"),
    "passes/dynamo/join_op_runs.py": ("_FEWEST = 3", "_FEWEST = 4"),
    "passes/post_grad/remove_unread.py": ("if node.users or", "if"),
    "torch_compat/dynamo.py": ("CheckpointPolicy.MUST_SAVE\n", "CheckpointPolicy.PREFER_SAVE\n"),
    "backend/inner.py": ("hoist=is_forward", "hoist=True"),
    "backend/derived_backward.py": ("partition = self.chosen or min_cut_partition", "partition = min_cut_partition"),
    "runtime/gather.py": ("import", "import  "),
}
OTHERS = ("wrap/policies.py", "state/layout.py", "tools/explain/events.py")

KEYS = """
import sys
from pathlib import Path

import compile_fsdp
from compile_fsdp.backend.derived_backward import Partitioner
from compile_fsdp.passes import Pipeline, pipelines
from compile_fsdp.passes.cache_key import cache_key, hash_sources

class Chosen:
    def uuid(self):
        return b"the user's"

def keys():
    hash_sources.cache_clear()
    passes = Pipeline(pipelines.post_grad(str, hoist=True, costs=None), print)
    return [cache_key(), passes.uuid(), Partitioner().uuid(), Partitioner(Chosen()).uuid()]

package = Path(compile_fsdp.__file__).parent
before = keys()
assert len(set(before)) == len(before) - 1, "only the user's partitioner has more to say"
print("uuid", before[1])
for name, (line, other) in DECIDING.items():
    path = package / name
    text = path.read_text()
    assert line in text, (name, line)
    path.write_text(text.replace(line, other, 1))
    print(name, *("same" if new == old else "other" for new, old in zip(keys(), before)))
    path.write_text(text)
assert keys() == before
"""


def test_keys_are_the_same_in_another_process_and_change_with_all_code_that_decides(tmp_path: Path) -> None:
    copy = tmp_path / "compile_fsdp"
    shutil.copytree(Path(compile_fsdp.__file__).parent, copy)
    for part in (compile_fsdp.passes, compile_fsdp.ops):  # they stand beside the package in a checkout
        shutil.copytree(Path(part.__file__).parent, copy / part.__name__.rpartition(".")[2], dirs_exist_ok=True)
    edits = {**DECIDING, **{name: ("import", "import  ") for name in OTHERS}}
    code = KEYS.replace("DECIDING", repr(edits))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {line.split()[0]: set(line.split()[1:]) for line in run.stdout.splitlines()}
    assert found.pop("uuid") == {Pipeline(passes(), ignore).uuid()}
    assert found == {name: {"other" if name in DECIDING else "same"} for name in edits}


def test_partitioner_without_a_key_is_not_cached() -> None:
    class Chosen:
        def uuid(self) -> None:
            return None

    assert Partitioner(Chosen()).uuid() is None  # type: ignore[arg-type]


def test_pipeline_pickles() -> None:
    custom_pass = Pipeline(passes(), ignore, ALL_DISABLED)
    assert isinstance(custom_pass, CustomGraphPass)
    assert pickle.loads(pickle.dumps(custom_pass)).uuid() == custom_pass.uuid()
