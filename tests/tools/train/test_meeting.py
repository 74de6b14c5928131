"""Ranks that are started again find each other at the store of those before them, and not the keys of the dead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from compile_fsdp.tools.train.config import TrainError
from compile_fsdp.tools.train.meeting import meet

LIMIT_S = 60.0


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()  # type: ignore[attr-defined, no-any-return]


def meet_all(store: dist.Store, size: int) -> set[str]:
    """The names that ranks started together meet under."""
    with ThreadPoolExecutor(size) as ranks:
        # Rank 0 last: the others find what was there before it.
        return set(ranks.map(lambda rank: meet(store, rank, size, LIMIT_S), reversed(range(size))))


def test_all_ranks_get_the_same_name_and_each_start_another(store: dist.Store) -> None:
    names = [meet_all(store, 3) for _ in range(3)]
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize("dead_rank", [0, 1])
def test_a_rank_that_died_while_it_waited_is_not_met(dead_rank: int, store: dist.Store) -> None:
    with pytest.raises(TrainError):
        meet(store, dead_rank, 2, limit_s=0.1)
    assert len(meet_all(store, 2)) == 1


def test_rank_0_that_comes_late_is_found_by_who_waits_for_the_one_before(store: dist.Store) -> None:
    meet_all(store, 2)
    names: list[str] = []
    waiting = threading.Thread(target=lambda: names.append(meet(store, 1, 2, LIMIT_S)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    name = meet(store, 0, 2, LIMIT_S)
    waiting.join(LIMIT_S)
    assert names == [name]


def test_one_rank_meets_itself(store: dist.Store) -> None:
    assert meet(store, 0, 1, LIMIT_S)


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (1, "0"), (2, "0")])
def test_missing_ranks_are_named(rank: int, missing: str, store: dist.Store) -> None:
    expected = rf"expected rank {missing} to start within 0\.2 s, got nothing from it; .*raise --timeout-s"
    with pytest.raises(TrainError, match=expected):
        meet(store, rank, 3, limit_s=0.2)
