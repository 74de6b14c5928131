"""Rules of `check` on hand-made models and reports."""

from __future__ import annotations

import ast
import linecache
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from compile_fsdp.backend.captured_backward import FALLS_BACK
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.reports import Direction, GraphReport
from compile_fsdp.tools.check import rules as rules_file
from compile_fsdp.tools.check.failures import describe
from compile_fsdp.tools.check.findings import Finding, Level
from compile_fsdp.tools.check.models import ShardedGroup, ShardedModel
from compile_fsdp.tools.check.rules import Seen, describe_reason, find
from compile_fsdp.tools.explain.capture import (
    Capture,
    CapturedGraph,
    GraphBreak,
    Place,
    Recompile,
    describe_guard,
    split_reason,
)
from compile_fsdp.tools.scripts import Steps
from compile_fsdp.torch_compat.dynamo import CompileSettings
from compile_fsdp.torch_compat.fsdp import FSDPState
from helpers.pages.code_blocks import ROOT

_TORCH = Path(torch.__file__).parent
_GROUPS = (
    ShardedGroup("the root", ("head.weight",), 32, reshards=False, is_captured=True, is_last=False),
    ShardedGroup("0", ("0.weight", "0.bias"), 64, reshards=True, is_captured=True, is_last=True),
)
_MODEL = ShardedModel(
    name="Model",
    is_traceable=True,
    settings=CompileSettings("compile_fsdp", True),
    compiled_parts=(),
    groups=_GROUPS,
    forward_graphs=1,
    backward_graphs=1,
    is_whole=True,
    trains=True,
    has_run=True,
)


def _seen(*kept: tuple[str, str], direction: Direction = "forward", model: ShardedModel = _MODEL) -> Seen:
    report = GraphReport(direction, "inductor", 1, 1, 2, kept, 9, 9, 0.0, False)
    captured = Capture()
    captured.reports.append(report)
    captured.graphs.append(CapturedGraph(direction, (), Counter(), Counter(), kept=kept))
    return Seen(captured, (model,), steps=2)


def _rules(seen: Seen) -> list[tuple[Level, str]]:
    return [(finding.level, finding.rule) for finding in find(seen)]


def test_root_kept_unsharded_is_no_finding() -> None:
    assert find(_seen(("head.weight", "open at return"))) == ()


def test_kept_window_is_named_with_its_reason() -> None:
    (found,) = find(_seen(("0.weight", "mutated in the window"), ("0.bias", "mutated in the window")))
    assert (found.level, found.rule, found.names) == (Level.COSTS, "kept-window", ("0.weight", "0.bias"))
    assert "mutated in the window" in found.what


@pytest.mark.parametrize(("is_last", "found"), [(False, [(Level.COSTS, "kept-unsharded")]), (True, [])])
def test_only_the_last_group_may_stay_unsharded(is_last: bool, found: list[tuple[Level, str]]) -> None:
    groups = (_GROUPS[0], replace(_GROUPS[1], reshards=False, is_last=is_last))
    assert _rules(_seen(("0.weight", "open at return"), model=replace(_MODEL, groups=groups))) == found


def test_equal_names_in_two_models_are_told_apart() -> None:
    resharded = replace(_MODEL, name="Model 2")
    kept = replace(_MODEL, groups=(_GROUPS[0], replace(_GROUPS[1], reshards=False, is_last=True)))
    for models in ((kept, resharded), (resharded, kept)):
        seen = replace(_seen(("Model.0.weight", "open at return")), models=models)
        seen.captured.models.update({FSDPState(): model.name for model in models})
        assert find(seen) == ()
        seen.captured.graphs[0].kept = (("Model 2.0.weight", "open at return"),)
        (found,) = find(seen)
        assert (found.rule, found.names) == ("kept-window", ("Model 2.0.weight",))


@pytest.mark.parametrize("by_budget", [True, False])
def test_group_kept_unsharded_by_budget_or_an_earlier_setting_is_a_note(by_budget: bool) -> None:
    seen = _seen(("0.weight", "open at return"))
    if by_budget:
        (report,) = seen.captured.reports
        seen.captured.reports[:] = [replace(report, decision=BudgetDecision((1,), (), False, 4, 9, 9, 0.0, True))]
    else:
        seen.captured.recompiles.append(Recompile(Place("train.py", 7, ""), "f", "x.post_forward_mesh_info is None"))
    found = find(seen)[0]
    assert (found.level, found.rule, found.names) == (Level.NOTE, "kept-unsharded", ("0.weight",))
    assert ("memory_budget" if by_budget else "reshard_after_forward was False") in found.what


def test_eager_backward_is_a_break(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()  # of a train.py of an earlier test
    seen = _seen(model=replace(_MODEL, backward_graphs=0))
    seen.captured.notes.append(
        f"{FALLS_BACK}Dynamic control flow\n  Explanation: It depends on data.\n  Hint: Use torch.where.\n\n"
        'from user code:\n  File "train.py", line 7, in f'
    )
    (found,) = find(seen)
    assert (found.level, found.rule, found.place) == (Level.BREAKS, "eager-backward", Place("train.py", 7, ""))
    assert found.what.endswith(": Dynamic control flow. It depends on data.")
    assert found.remedy.endswith("Use torch.where.")


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (replace(_MODEL, backward_graphs=0), "no-backward-graph"),
        (replace(_MODEL, is_whole=False, forward_graphs=3), "several-graphs"),
        (replace(_MODEL, groups=tuple(replace(group, is_captured=False) for group in _GROUPS)), "not-captured"),
    ],
)
def test_model_without_one_whole_graph_is_a_break(model: ShardedModel, rule: str) -> None:
    assert _rules(_seen(model=model)) == [(Level.BREAKS, rule)]


def test_pieces_of_a_broken_forward_add_no_findings() -> None:
    seen = _seen(model=replace(_MODEL, is_whole=False, forward_graphs=3))
    place = Place("train.py", 7, "print(x)")
    seen.captured.breaks += [GraphBreak(place, reason, "", ()) for reason in ("first", "second")]
    seen.captured.recompiles.append(Recompile(place, "torch_dynamo_resume_in_forward_at_7", "0/0: x == 1"))
    (found,) = find(seen)
    assert (found.level, found.rule, found.what) == (Level.BREAKS, "graph-break", "first. second.")


def test_graph_breaks_in_torch_optimizers_are_ignored() -> None:
    place = Place("/lib/torch/optim/optimizer.py", 79, "torch._dynamo.graph_break()")
    in_pieces = replace(_MODEL, is_whole=False, forward_graphs=3)
    for model, rules in ((_MODEL, []), (in_pieces, [(Level.BREAKS, "several-graphs")])):
        seen = _seen(model=model)
        seen.captured.breaks.append(GraphBreak(place, "a call", "", ()))
        assert _rules(seen) == rules


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("nn/modules", ("train.py", 7)), ("optim", (f"{_TORCH}/optim/file.py", 5))],
    ids=["a line of the user's has called it", "torch's optimizer"],
)
def test_graph_break_inside_torch_has_users_line_except_in_optimizers(folder: str, expected: tuple[str, int]) -> None:
    captured = Capture()
    captured.add_break(
        f"Graph break in user code at {_TORCH}/{folder}/file.py:5\nGraph Break Reason: a call\n\nUser code traceback:\n"
        f'  File "train.py", line 7, in forward\n  File "{_TORCH}/{folder}/file.py", line 5, in forward\n'
    )
    (found,) = captured.breaks
    assert (found.place.filename, found.place.line) == expected


@pytest.mark.parametrize(
    ("reason", "level", "remedy"),
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 6", Level.COSTS, "drop_last=True"),
        ("scale == 1.5", Level.COSTS, "as a tensor"),
        ("hooks.groups[0].fsdp_group._sharded_state is other", Level.COSTS, "reshard()"),
        ("fsdp_group.reduce_grads == False", Level.NOTE, "reductions"),
        ("GLOBAL_STATE changed: grad_mode", Level.NOTE, "evaluation"),
        ("fsdp_group.post_forward_mesh_info is None", Level.NOTE, "reshard_after_forward"),
    ],
)
def test_recompile_remedy_matches_the_failed_guard(reason: str, level: Level, remedy: str) -> None:
    seen = _seen()
    seen.captured.recompiles.append(Recompile(Place("train.py", 7, ""), "the model", reason, times=3))
    (found,) = find(seen)
    assert (found.level, found.rule) == (level, "recompiled")
    assert found.what.startswith("Dynamo compiled the model again 3 times, because ")
    assert remedy in found.remedy


@pytest.mark.parametrize("prefix", ["0/0: ", "!1/0/0: "])
def test_guards_are_named_without_ids_and_code(prefix: str) -> None:
    assert describe_guard(f"{prefix}___check_obj_id(a, 140369526442000)  # return a") == "___check_obj_id(a)"


def test_error_of_an_inner_backend_is_named_with_its_cause() -> None:
    error = RuntimeError("backend='compile_fsdp' raised:\nImportError: install xla\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert describe(error) == "RuntimeError: backend='compile_fsdp' raised: ImportError: install xla"


def test_sharded_copy_that_never_ran_is_a_note() -> None:
    groups = tuple(replace(group, is_captured=False, reshards=True) for group in _GROUPS)
    copied = replace(_MODEL, settings=None, has_run=False, groups=groups)
    seen = replace(_seen(("head.weight", "open at return")), models=(_MODEL, copied))
    assert _rules(seen) == [(Level.NOTE, "not-run")]


def test_reason_of_a_break_is_the_innermost_without_addresses() -> None:
    text = "Failed to handle graph break gracefully. Graph break encountered:\n\nCall of <f at 0x7f8f60> (reason: None)"
    assert describe_reason(*split_reason(text)[:2]) == "Call of <f>."


@pytest.mark.parametrize(
    ("reason", "explanation", "said"),
    [
        ("Skip `disable()`d function", "Skip function f since of `disable`", "Skip function f since of `disable`."),
        ("Skip the frame", "Skip function f", "Skip the frame. Skip function f."),
        ("Skip the frame", "", "Skip the frame."),
    ],
)
def test_reason_of_a_break_is_said_once(reason: str, explanation: str, said: str) -> None:
    assert describe_reason(reason, explanation) == said


def test_breaks_come_before_costs() -> None:
    failure = Finding(Level.BREAKS, "refused", "It failed.", "Change it.")
    seen = replace(_seen(("0.weight", "mutated in the window")), failure=failure, models=(_MODEL,))
    assert _rules(seen) == [(Level.BREAKS, "refused"), (Level.COSTS, "kept-window")]


def test_missing_sharded_model_is_a_break() -> None:
    assert _rules(Seen(Capture(), (), steps=2)) == [(Level.BREAKS, "no-sharded-model")]


@pytest.mark.parametrize(
    ("order", "steps"),
    [("aa", 2), ("abab", 2), ("abcabc", 2), ("abbbbb", 5)],
    ids=["one", "in turn", "three", "one that is stepped once"],
)
def test_script_ends_when_optimizers_reach_the_step_limit(order: str, steps: int) -> None:
    optimizers = {name: SGD(nn.Linear(1, 1).parameters(), lr=0.1) for name in order}
    counted = Steps(2)
    assert [counted.count(optimizers[name]) for name in order] == [False] * (len(order) - 1) + [True]
    assert counted.made == steps


def test_check_page_lists_every_rule() -> None:
    page = (ROOT / "docs" / "explain.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \| (\w+) \|", page, flags=re.MULTILINE)
    made = set()
    for file in Path(rules_file.__file__).parent.glob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "Finding" and isinstance(call.args[1], ast.Constant):
                made.add(call.args[1].value)
    assert sorted(name for name, _ in listed) == sorted(made)
    assert {level for _, level in listed} == {level.value for level in Level}
