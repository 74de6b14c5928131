"""`compile-fsdp explain`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compile_fsdp.cli import main
from helpers.ranks.forked import COMMAND, run_forked

SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from torch import nn
import beside
from compile_fsdp import fully_shard

if not dist.is_initialized():
    dist.init_process_group("gloo")
assert __name__ == "__main__" and sys.argv[1:] == ["--width", "8"]
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
for module in (model[0], model):
    fully_shard(module)
model.compile(backend="compile_fsdp", options=beside.OPTIONS)
model(torch.randn(2, 8)).sum().backward()
print("ranks", dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    torch._dynamo.reset()
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("OPTIONS = {}\n")
    return path


def _data(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_script_is_explained_in_a_fake_world(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = script.parent / "report.html"
    before = list(sys.argv), list(sys.path)
    assert main(["explain", "--out", str(page), "--world", "16", str(script), "--width", "8"]) == 0
    assert (sys.argv, sys.path) == before
    assert not dist.is_initialized()
    out = capsys.readouterr().out
    for part in ("ranks 16", "script.py on 16 ranks", "1 forward, 1 backward", f"wrote {page}"):
        assert part in out
    data = _data(page)
    assert [graph["kind"] for graph in data["graphs"]] == ["forward", "backward"]
    assert {row["facts"]["name"] for row in data["groups"]} == {"0", "the root"}


def test_missing_script_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "r.html"
    assert main(["explain", "--out", str(page), str(tmp_path / "script.py")]) == 2
    error = capsys.readouterr().err
    assert "expected a Python file to run, got" in error and error.count("\n") == 1
    assert not page.exists()
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('ran')")
    assert main(["explain", "--out", str(tmp_path / "missing" / "r.html"), str(script)]) == 2
    assert "expected a file that can be written, got" in capsys.readouterr().err


@pytest.mark.slow
def test_rank_0_reports_a_job_with_real_ranks(script: Path) -> None:
    page = script.parent / "report.html"
    out = run_forked(script.parent, COMMAND, "explain", "--out", page, script, "--width", "8")
    assert "script.py on 2 ranks" in out and out.count(f"wrote {page}") == 1
    assert [graph["kind"] for graph in _data(page)["graphs"]] == ["forward", "backward"]
