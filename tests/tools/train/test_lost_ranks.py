"""A rank that has lost another one says so in a line, and ends within its limit: here nobody else would end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.faults.jobs import Kill, prepare

TIMEOUT_S = 30
LOST = f"expected an answer of the other ranks within {TIMEOUT_S} s"
LIMIT_S = 240  # start, imports and compilation come before


def start_rank(folder: Path, rank: int, port: int, command: list[object]) -> subprocess.Popen[str]:
    """What torchrun does for each rank, without torchrun, which ends all ranks when one fails."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": 0}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, **{name: str(value) for name, value in (place | elastic).items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("compile", f"expected rank 1 to compile its forward graph within {TIMEOUT_S} s, got nothing from it"),
        ("backward", LOST),
        ("save", LOST),
    ],
)
def test_the_survivor_ends_with_an_error_that_says_so(phase: str, expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    kill = Kill(phase, rank=1, occurrence=1, delay_s=0.0)
    command = prepare(folder, steps=20, kills=[kill], inner_backend="aot_eager", timeout_s=TIMEOUT_S)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_rank(folder, rank, port, command) for rank in (0, 1)]
    try:
        output = ranks[0].communicate(timeout=LIMIT_S)[0]
        ranks[1].wait(timeout=LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (ranks[0].returncode, ranks[1].returncode) == (2, -signal.SIGKILL), output
    last = output.splitlines()[-1]
    assert last.startswith("compile-fsdp: error (rank 0): "), output
    assert expected in last
    assert "--timeout-s" in last
    assert "Timed out" not in last  # the connection breaks at once
