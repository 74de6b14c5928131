"""Scripts that commands run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from compile_fsdp.errors import ScriptError
from compile_fsdp.tools.scripts import fake_world, run_script


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "expected a Python file to run, got"),
        ("raise SystemExit(3)", "got exit status 3"),
        (
            "import torch.distributed as d\nd.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
            "`if not dist.is_initialized\\(\\):`",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, source: str | None, expected: str) -> None:
    path = tmp_path / "script.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ScriptError, match=expected), fake_world(2):
        run_script(path, [])
    assert not dist.is_initialized()


def test_a_world_has_ranks() -> None:
    with pytest.raises(ScriptError, match="expected --world to be at least 1, got 0"), fake_world(0):
        pass


def test_a_script_may_raise_its_own_errors(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise ZeroDivisionError('mine')")
    with pytest.raises(ZeroDivisionError, match="mine"), fake_world(2):
        run_script(path, [])
    assert not dist.is_initialized()


def test_a_script_finds_its_rank_as_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path, out = tmp_path / "script.py", tmp_path / "out"
    path.write_text(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')\n"
        "open(sys.argv[1], 'w').write(' '.join(os.environ[name] for name in names))\n"
    )
    argv = list(sys.argv)
    with fake_world(16):
        run_script(path, [str(out)])
    assert out.read_text() == "0 0 16 1"
    assert os.environ["RANK"] == "7" and "LOCAL_RANK" not in os.environ and sys.argv == argv
