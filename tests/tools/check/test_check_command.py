"""`compile-fsdp check` on small scripts, most with one fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from compile_fsdp.cli import main
from helpers.pages.code_blocks import ROOT
from helpers.ranks.forked import COMMAND, run_forked

# Each test replaces parts of it.
_SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from compile_fsdp import fully_shard

dist.init_process_group("nccl")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        {line}
        return y.relu()

model = nn.Sequential(Block(), nn.Linear(8, 4))
{shard}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{compile}
for step in range(100):
    model(torch.randn({batch}, 8)).sum().backward()
    {step}
    {end}
print("ran to its end")
"""

_USUAL = {
    "line": "pass",
    "shard": "for module in (model[0], model):\n    fully_shard(module)",
    "compile": 'model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "eager"})',
    "batch": "4",
    "step": "optimizer.step()",
    "end": "optimizer.zero_grad()",
}

WriteScript = Callable[..., Path]


@pytest.fixture
def write_script(tmp_path: Path) -> WriteScript:
    """Function that writes the script with some parts replaced, or another text."""
    torch._dynamo.reset()

    def write(text: str | None = None, **parts: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text or _SCRIPT.format(**(_USUAL | parts)))
        return path

    return write


class Result(NamedTuple):
    """The script, and exit status, output and JSON findings of `check`."""

    script: Path
    status: int
    out: str
    data: Any

    def rules(self, level: str) -> list[str]:
        return [finding["rule"] for finding in self.data["findings"] if finding["level"] == level]

    def finding(self, rule: str) -> Any:
        (found,) = [finding for finding in self.data["findings"] if finding["rule"] == rule]
        return found


Check = Callable[..., Result]


@pytest.fixture
def check(write_script: WriteScript, capsys: pytest.CaptureFixture[str]) -> Check:
    """Function that writes the script, runs `check` with options, and reads its output and JSON file."""

    def run(*options: str, **parts: str) -> Result:
        script = write_script(**parts)
        path = script.parent / "found.json"
        status = main(["check", "--json", str(path), *options, str(script)])
        assert not dist.is_initialized()
        return Result(script, status, capsys.readouterr().out, json.loads(path.read_text()))

    return run


def test_script_that_compiles_whole_has_no_breaks(check: Check) -> None:
    result = check("--world", "16")
    assert result.status == 0 and result.rules("breaks") == []
    assert "train.py on 16 ranks, 2 steps: compiles whole" in result.out
    assert "ran to its end" not in result.out
    assert "Sequential: 2 groups, 1 forward graph, 1 backward graph" in result.out
    data = result.data
    assert (data["compiles_whole"], data["world_size"], data["steps"]) == (True, 16, 2)
    (model,) = data["models"]
    assert model["settings"] == {"backend": "compile_fsdp", "fullgraph": True} and model["is_whole"]
    assert [group["name"] for group in model["groups"]] == ["the root", "0"]
    # The inner backend `eager` runs graphs op by op, which is a cost.
    assert result.rules("costs") == ["inner-backend"]


@pytest.mark.parametrize(
    ("line", "fullgraph", "words"),
    [
        ('print("mean", y.mean().item())', "False", ("Tensor.item()", "`print`")),
        ("y = y * 2 if y.sum() > 0 else y", "True", ("Detected data-dependent branching",)),
    ],
)
def test_graph_break_has_line_and_remedy(check: Check, line: str, fullgraph: str, words: tuple[str, ...]) -> None:
    result = check(line=line, compile=_USUAL["compile"].replace("True", fullgraph))
    assert result.status == 1 and result.rules("breaks") == ["graph-break"]
    found, script = result.finding("graph-break"), result.script
    number = script.read_text().splitlines().index(f"        {line}") + 1
    assert (found["place"]["filename"], found["place"]["line"]) == (str(script), number)
    assert f"{script}:{number}" in result.out and f"> {line}" in result.out
    assert all(word in found["what"] for word in words)
    assert found["remedy"]
    assert ("not-fullgraph" in result.rules("note")) == (fullgraph == "False")


@pytest.mark.parametrize(
    ("parts", "rule", "words"),
    [
        ({"compile": ""}, "not-compiled", "never compiled"),
        ({"compile": 'model.compile(backend="eager")'}, "other-backend", 'the backend "eager"'),
        ({"compile": 'model = torch.compile(model, backend="eager")'}, "other-backend", 'the backend "eager"'),
        (
            {"compile": 'model[0].compile(backend="compile_fsdp", options={"inner_backend": "eager"})'},
            "module-not-captured",
            "Compiled by themselves: 0",
        ),
        (
            {
                "shard": "model = nn.Sequential(Block(), Block())\n"
                "for module in (*model, model):\n    fully_shard(module)",
                "compile": "for block in model:\n"
                '    block.compile(backend="compile_fsdp", options={"inner_backend": "eager"})',
            },
            "several-graphs",
            "runs as 2 forward graphs without a graph break. Compiled by themselves: 0, 1.",
        ),
    ],
    ids=["not compiled", "model.compile", "torch.compile", "a block", "all blocks"],
)
def test_model_not_compiled_as_one_graph_breaks(check: Check, parts: dict[str, str], rule: str, words: str) -> None:
    result = check(**parts)
    assert result.status == 1 and rule in result.rules("breaks")
    assert words in result.finding(rule)["what"]
    assert 'backend="compile_fsdp"' in result.finding(rule)["remedy"]


def test_torch_sharded_model_needs_make_traceable(check: Check) -> None:
    shard = "import torch.distributed.fsdp as fsdp\nfor module in (model[0], model):\n    fsdp.fully_shard(module)"
    result = check(shard=shard)
    # Since torch 2.14.1, Dynamo ends the trace at torch's hooks, so the backend gets no graph.
    first = "graph-break" if torch.__version__ >= "2.14.1" else "refused"
    assert result.status == 1 and result.rules("breaks") == [first, "not-traceable"]
    assert "make_traceable(model)" in result.finding("not-traceable")["remedy"]
    if first == "refused":
        assert result.finding(first)["what"].startswith("NotShardedError: expected a sharded model")


@pytest.mark.parametrize(
    ("shard", "rule", "names"),
    [
        (
            "model.insert(0, Block())\nfully_shard(model[0], reshard_after_forward=False)\n"
            "for module in (model[1], model):\n    fully_shard(module)",
            "kept-unsharded",
            ["0.linear.weight", "0.linear.bias"],
        ),
        ("fully_shard(model)", "one-group", ["the root"]),
    ],
)
def test_group_kept_unsharded_or_single_group_is_a_cost(check: Check, shard: str, rule: str, names: list[str]) -> None:
    result = check("--strict", "--steps", "1", shard=shard)
    assert (result.status, result.data["compiles_whole"], result.data["steps"]) == (1, True, 1)
    assert result.rules("costs") == [rule, "inner-backend"]
    assert result.finding(rule)["names"] == names
    assert ("288 B" in result.finding(rule)["what"]) == (rule == "kept-unsharded")


def test_changing_batch_size_is_reported_as_recompile(check: Check) -> None:
    result = check(batch="4 + 2 * step")
    assert result.status == 0
    found = result.finding("recompiled")
    assert "expected 4, actual 6" in found["what"] and "drop_last=True" in found["remedy"]
    assert found["place"]["source"] == "model(torch.randn(4 + 2 * step, 8)).sum().backward()"


def test_script_without_optimizer_steps_is_noted(check: Check) -> None:
    result = check(step="", end="break")
    assert result.status == 0 and result.data["steps"] == 0
    assert "ran to its end" in result.out
    assert result.rules("note") == ["no-step"]


def test_steps_are_counted_with_one_optimizer_per_parameter(check: Check) -> None:
    hooks = (
        "own = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}\n"
        "for each in own:\n    each.register_post_accumulate_grad_hook(lambda p: own[p].step())"
    )
    result = check(shard=f"{_USUAL['shard']}\n{hooks}", step="")
    assert (result.status, result.data["steps"]) == (0, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise ZeroDivisionError('mine')", "ZeroDivisionError: mine at "),
        ("raise SystemExit(3)", "got exit status 3"),
        ('torch.compile(model, backend="eager")(torch.randn(4, 9))', "a and b must have same reduction dim"),
        ("torch.cuda.set_device(0)", "this machine has no GPU that torch can use"),
    ],
)
def test_script_error_is_reported_with_its_line(
    write_script: WriteScript, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    script = write_script(compile=f"if True:\n    {line}")
    if "cuda" in line and torch.cuda.is_available():
        pytest.skip("a machine with a GPU does not fail here")
    assert main(["check", str(script)]) == 2
    *traceback, error = capsys.readouterr().err.splitlines()
    assert error.startswith("compile-fsdp: error: expected ") and message in error
    if "SystemExit" not in line:
        number = script.read_text().splitlines().index(f"    {line}") + 1
        assert any(f'"{script}", line {number}' in each for each in traceback)
        assert "tools/scripts.py" not in "".join(traceback)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backend", "line", "message"),
    [
        ("compile_fsdp", "import compile_fsdp.state as s; s.load(model, optimizer, 'no')", "CheckpointError: "),
        ("compile_fsdp", "open('no/such/file', 'w')", "FileNotFoundError: [Errno 2] No such file"),
        ("eager", "raise ZeroDivisionError('mine')", "ZeroDivisionError: mine"),
    ],
)
def test_error_outside_compiled_steps_is_a_script_error(
    write_script: WriteScript, capsys: pytest.CaptureFixture[str], backend: str, line: str, message: str
) -> None:
    options = ', options={"inner_backend": "eager"}' if backend == "compile_fsdp" else ""
    script = write_script(compile=f'model.compile(backend="{backend}"{options})', end=line)
    assert main(["check", str(script)]) == 2
    captured = capsys.readouterr()
    assert f"make its steps, got {message}" in captured.err.splitlines()[-1]
    assert "does not compile whole" not in captured.out


def test_error_inside_a_custom_backend_is_a_compiler_error(check: Check) -> None:
    backend = "def broken(graph, inputs):\n    return lambda *args: int('of the backend')\n"
    result = check(compile=f"{backend}model.compile(backend=broken)")
    assert result.status == 1 and "compiler-error" in result.rules("breaks")
    assert "of the backend" in result.finding("compiler-error")["what"]


def test_invalid_arguments_are_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["train.py"], ["--steps", "0", "train.py"], ["--world", "0", "train.py"]):
        assert main(["check", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('ran')")
    assert main(["check", "--json", str(tmp_path / "missing" / "f.json"), str(script)]) == 2
    assert "expected a file that can be written, got" in capsys.readouterr().err


@pytest.mark.slow
def test_inductor_removes_copy_windows(check: Check) -> None:
    result = check(text=(ROOT / "examples" / "plain_loop.py").read_text())
    assert result.status == 0 and result.data["findings"] == []
    assert result.data["windows_removed"] > 0
    (root,) = [group for group in result.data["models"][0]["groups"] if not group["reshards"]]
    assert result.data["windows_kept"] == len(root["parameters"]) == 3


@pytest.mark.slow
def test_check_runs_on_real_ranks(write_script: WriteScript) -> None:
    script = write_script()
    script.write_text(script.read_text().replace('"nccl"', '"gloo"'))
    out = run_forked(script.parent, COMMAND, "check", script)
    assert out.count("train.py on 2 ranks, 2 steps: compiles whole") == 1
