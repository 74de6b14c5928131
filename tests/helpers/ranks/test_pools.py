"""Error reports of ranks that raise, hang, die or crash."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from helpers.ranks.pools import RankError, RankTimeout, run_ranks
from helpers.ranks.threads import run_threads


def _rank_one_hangs(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def _rank_one_raises(rank: int) -> int:
    if rank == 1:
        raise ValueError("only here")
    return rank


def _rank_one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def _rank_one_crashes(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)


def test_error_names_its_rank_and_the_pool_stays_usable() -> None:
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*ValueError: only here"):
        run_ranks(2, _rank_one_raises)
    assert run_ranks(2, _get_rank) == [0, 1]


def _get_rank(rank: int) -> int:
    return rank


def test_timeout_shows_only_the_stack_of_the_hanging_rank() -> None:
    run_ranks(2, _get_rank)  # the ranks are up
    with pytest.raises(RankTimeout) as error:
        run_ranks(2, _rank_one_hangs, timeout_s=2.0)
    assert "rank 1 was at:" in str(error.value)
    assert "_rank_one_hangs" in str(error.value)
    assert "rank 0 was at:" not in str(error.value)


def test_dead_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankTimeout, match="rank 1 died with exit code"):
        run_ranks(2, _rank_one_dies)


def test_crashed_rank_shows_its_stack() -> None:
    with pytest.raises(RankTimeout, match=r"Segmentation fault(.|\n)*_rank_one_crashes"):
        run_ranks(2, _rank_one_crashes)


def _sum_of_ranks(rank: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def _rank_one_raises_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_thread_ranks_run_collectives_and_report_errors() -> None:
    assert run_threads(4, _sum_of_ranks) == [6.0] * 4
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*ValueError: only here"):
        run_threads(2, _rank_one_raises_while_others_wait)
    assert run_threads(3, _sum_of_ranks) == [3.0] * 3


def test_timeout_shows_only_the_stack_of_the_hanging_thread() -> None:
    released = threading.Event()

    def hang(rank: int) -> None:
        if rank == 1:
            released.wait()

    try:
        with pytest.raises(RankTimeout, match=r"rank 1 was at:(.|\n)*released\.wait") as error:
            run_threads(2, hang, timeout_s=0.5)
        assert "rank 0 was at:" not in str(error.value)
    finally:
        released.set()
