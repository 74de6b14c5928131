"""A rank that has lost another one says so in a line, and ends within its limit: here nobody else would end it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.faults.jobs import Kill, prepare
from helpers.ranks.forked import start_ranks

TIMEOUT_S = 30
LOST = f"expected an answer of the other ranks within {TIMEOUT_S} s"
LIMIT_S = 240  # start, imports and compilation come before


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
    ranks = start_ranks(folder, command)
    try:
        (code, output), (lost, _) = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (code, lost) == (2, -signal.SIGKILL), output
    last = output.splitlines()[-1]
    assert last.startswith("compile-fsdp: error (rank 0): "), output
    assert expected in last
    assert "--timeout-s" in last
    assert "Timed out" not in last  # the connection breaks at once
