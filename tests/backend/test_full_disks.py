"""Errors for a full or read-only disk while a step compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_STEP = """
import pathlib, sys
import torch
from torch import nn

import compile_fsdp
from helpers.ranks.fake_world import fake_world

filler = pathlib.Path(sys.argv[1]) if sys.argv[1:] else None

def fill_disk():
    try:
        with filler.open("wb") as file:
            while True:
                file.write(bytes(2**20))
                file.flush()
    except OSError:
        pass

with fake_world(2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    for module in (model[0], model[2], model):
        compile_fsdp.fully_shard(module)
    weights = [parameter.to_local().clone() for parameter in model.parameters()]
    model.compile(backend="compile_fsdp", fullgraph=True, options={"progress": False})
    for direction in ("forward", "backward"):
        if direction == "backward":
            loss = model(torch.ones(3, 4)).square().mean()
        if filler:
            fill_disk()
        try:
            if direction == "forward":
                model(torch.ones(3, 4))
            else:
                loss.backward()
        except Exception as error:
            print(direction, "No space left on device" in str(error))
        if filler:
            filler.unlink()
        model.reset_iter_state()
        assert all(map(torch.equal, weights, (parameter.to_local() for parameter in model.parameters())))
        assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(3, 4)).square().mean().backward()
    print("trained", all(parameter.grad is not None for parameter in model.parameters()))
"""


def _run(mount: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the shell command `mount`, then `command`, in a private mount namespace."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
    }
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    return subprocess.run(
        [*isolated, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    if not shutil.which("unshare") or _run(f"mount -t tmpfs tmpfs {made}", made, "true").returncode:
        pytest.skip("this user may not mount a file system of its own, to fill it up")
    return made


@pytest.mark.slow
def test_full_disk_is_reported_and_training_continues_once_there_is_space(folder: Path) -> None:
    mount = f"mount -t tmpfs -o size=512m tmpfs {folder}"
    done = _run(mount, folder, sys.executable, "-c", _STEP, str(folder / "filler"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["forward True", "backward True", "trained True"]


def test_read_only_cache_is_named(folder: Path) -> None:
    (folder / "cache").mkdir()
    mount = f"mount --bind {folder}/cache {folder}/cache && mount -o remount,bind,ro {folder}/cache"
    done = _run(mount, folder, sys.executable, "-c", _STEP)
    assert done.returncode != 0
    assert f"Read-only file system: '{folder}/cache" in done.stderr
