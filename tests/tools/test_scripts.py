"""Scripts that commands run in a fake world."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from compile_fsdp.errors import CommandError, ScriptError
from compile_fsdp.tools.launch import fake_world
from compile_fsdp.tools.scripts import check_output, run_script

INIT = dist.init_process_group


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [
        (0, 0, "expected --world to be at least 1, got 0"),
        (2, 2, "expected --rank to be at least 0 and less than 2, got 2"),
        (2, -1, "got -1"),
    ],
)
def test_world_size_and_rank_must_fit(size: int, rank: int, expected: str) -> None:
    with pytest.raises(ScriptError, match=expected), fake_world(size, rank):
        pass


@pytest.mark.usefixtures("one_rank")
def test_failed_fake_world_leaves_process_group_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="twice"), fake_world(2):
        pass
    assert dist.get_backend() == "gloo"
    assert os.environ.keys().isdisjoint({"RANK", "WORLD_SIZE", "MASTER_ADDR"})


def test_script_exceptions_propagate(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise ZeroDivisionError('mine')")
    with pytest.raises(ZeroDivisionError, match="mine"), fake_world(2):
        run_script(path, [])
    assert not dist.is_initialized()


def test_script_gets_torchrun_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path, out = tmp_path / "script.py", tmp_path / "out"
    path.write_text(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')\n"
        "open(sys.argv[1], 'w').write(' '.join(os.environ[name] for name in names))\n"
    )
    argv = list(sys.argv)
    with fake_world(16):
        run_script(path, [str(out)])
    assert out.read_text() == "0 0 16 1 127.0.0.1"
    assert os.environ["RANK"] == "7" and "LOCAL_RANK" not in os.environ and sys.argv == argv


@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group('nccl')",
        "from torch.distributed import init_process_group as init\ninit(backend='gloo', init_method='env://')",
        "from beside import set_up\nset_up()",
    ],
)
def test_init_process_group_keeps_the_fake_world(tmp_path: Path, call: str) -> None:
    path = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text(
        "import torch.distributed\n\ndef set_up():\n    torch.distributed.init_process_group('nccl', timeout=None)\n"
    )
    path.write_text(f"import sys\nimport torch.distributed as dist\n{call}\nranks = dist.get_world_size()\n")
    try:
        with fake_world(16):
            assert run_script(path, [])["ranks"] == 16
    finally:
        sys.modules.pop("beside", None)
    assert dist.init_process_group is c10d.init_process_group is INIT


def test_output_of_rank_0_is_refused_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    for _ in range(2):
        check_output(file)
        file.touch()
    for path in (tmp_path, tmp_path / "missing" / "found.json", file / "found.json"):
        with pytest.raises(CommandError, match=f"expected a file that can be written, got {path};"):
            check_output(path)
    monkeypatch.setenv("RANK", "1")
    check_output(tmp_path / "missing" / "found.json")
