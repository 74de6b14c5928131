"""Ranks that raise, hang, die, crash or lose their parent; a process group under torchrun's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from compile_fsdp.errors import CommandError
from compile_fsdp.tools import launch
from compile_fsdp.tools.launch import RankError, RankLost
from helpers.ranks.pools import run_ranks

START_AND_DIE = """\
import os, signal
from compile_fsdp.tools.launch import Ranks

if __name__ == "__main__":
    print(*(process.pid for process in Ranks(2).processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _get_rank(rank: int) -> int:
    return rank


def _rank_one_fails(rank: int, how: str) -> None:
    if rank == 0:
        time.sleep(600 if how in ("exits", "crashes") else 0)
    elif how == "raises":
        raise ValueError("only here")
    elif how == "exits":
        sys.exit(7)
    elif how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        time.sleep(600)


def _rank_one_raises_while_rank_zero_waits(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_error_names_its_rank_and_the_ranks_stay_usable() -> None:
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*ValueError: only here"):
        run_ranks(2, _rank_one_fails, "raises")
    assert run_ranks(2, _get_rank) == [0, 1]


def test_error_ends_a_rank_that_waits_for_the_failed_rank() -> None:
    with pytest.raises(RankLost, match=r"ValueError: only here(.|\n)*rank 0 was at:(.|\n)*barrier"):
        run_ranks(2, _rank_one_raises_while_rank_zero_waits)


def test_timeout_shows_only_the_stack_of_the_hanging_rank() -> None:
    run_ranks(2, _get_rank)  # the ranks are up
    with pytest.raises(RankLost, match=r"not finished after 2 s\nrank 1 was at:(.|\n)*_rank_one_fails") as error:
        run_ranks(2, _rank_one_fails, "hangs", timeout_s=2.0)
    assert "rank 0 was at:" not in str(error.value) and error.value.exit_code is None


def test_exited_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankLost, match="rank 1 ended with exit code 7") as error:
        run_ranks(2, _rank_one_fails, "exits")
    assert error.value.exit_code == 7


def test_crashed_rank_shows_its_stack() -> None:
    with pytest.raises(RankLost, match=r"exit code -11(.|\n)*Segmentation fault(.|\n)*_rank_one_fails"):
        run_ranks(2, _rank_one_fails, "crashes")


def test_spawned_ranks_return_results_and_end() -> None:
    with launch.Ranks(2) as ranks:
        assert ranks.run(max, 1) == [1, 1]  # max(rank, 1)
        assert ranks.run(min, 1) == [0, 1]
    assert [process.exitcode for process in ranks.processes] == [0, 0]


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START_AND_DIE)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_process_without_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    launch.join(torch.device("cpu"))
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    finally:
        dist.destroy_process_group()


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(CommandError, match="expected a device for each of the 2 ranks of this host, got 1"):
        launch.use_device()
