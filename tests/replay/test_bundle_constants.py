"""Steps with a constant of their rank or of their process come from a bundle where the constant holds only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_fsdp.replay import bundle
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.models.bundled import Block, restart, trains_as_without
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks

pytestmark = pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")


class _ReadsRank(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + dist.get_rank())


class _ReadsPlace(Block):
    """Reads the rank's place in a mesh of its own, over the given ranks."""

    def __init__(self, width: int, ranks: Sequence[int] = (0, 1)) -> None:
        super().__init__(width)
        self.mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("cp",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.chunk(2, dim=1)[self.mesh.get_local_rank()].repeat(1, 2))


class _ReadsGroup(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.group = dist.distributed_c10d._get_default_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.group.rank())


_place = dist.get_rank  # the name does not tell


class _ReadsAlias(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + _place())


class _Redistributes(_ReadsPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(self.project(x), self.mesh, [Replicate()], run_check=False)
        part: Any = whole.redistribute(placements=[Shard(1)])
        return part.to_local().repeat(1, 2)  # type: ignore[no-any-return]


# By name, because ranks cannot import a test's classes.
RANK_READERS = {
    **{"rank": _ReadsRank, "mesh": _ReadsPlace, "group": _ReadsGroup},
    **{"alias": _ReadsAlias, "dtensor": _Redistributes},
}


def _restart(rank: int, folder: str, kind: str, is_own: bool) -> tuple[int, bool]:
    """Return how many forwards of a restarted model are replayed, and whether it trains as without a bundle."""
    (_, (forwards, _)), _, are_equal = restart(folder, is_own, RANK_READERS[kind])
    return forwards, are_equal


@pytest.mark.parametrize("kind", RANK_READERS)
def test_step_that_reads_its_rank_is_replayed_by_this_rank_only(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, _restart, str(tmp_path), kind, True) == [(3, True)] * 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["rank", "alias"])
def test_step_that_reads_its_rank_is_in_no_bundle_for_all_ranks(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, _restart, str(tmp_path), kind, False) == [(0, True)] * 2
    assert not list(tmp_path.iterdir())


class _ReadsCoordinate(_ReadsPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) * (1 + self.mesh.get_coordinate()[0])  # type: ignore[index]


def _on_meshes(rank: int, folder: str) -> list[bool]:
    """Start a model twice, and once with a mesh of other ranks; return whether each trains as without a bundle."""
    bundle.own_folder = lambda: Path(folder)
    return [trains_as_without(None, partial(_ReadsCoordinate, ranks=ranks)) for ranks in ([0, 1], [0, 1], [1, 0])]


def test_place_in_a_mesh_is_a_condition(tmp_path: Path) -> None:
    assert run_ranks(2, _on_meshes, str(tmp_path)) == [[True] * 3] * 2


@torch.compiler.assume_constant_result
def _factor() -> float:
    return _factors[-1]


_factors: list[float] = []


class _Assumes(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * _factor()


class _AssumesMethod(Block):
    @torch.compiler.assume_constant_result
    def factor(self) -> float:
        return _factors[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor()


ASSUMING = {"function": _Assumes, "method": _AssumesMethod}


def _with_factors(rank: int, folder: str, kind: str) -> list[bool]:
    """Start a model with two results of a function that is not traced; return whether each trains as without."""
    equal = []
    for factor in (2.0, 3.0):
        _factors.append(factor)
        equal.append(trains_as_without(Path(folder, "step.bundle"), ASSUMING[kind]))
    return equal


@pytest.mark.parametrize("kind", ASSUMING)
def test_results_that_are_assumed_constant_are_in_no_bundle(tmp_path: Path, kind: str) -> None:
    assert run_ranks(1, _with_factors, str(tmp_path), kind) == [[True, True]]
    assert not list(tmp_path.iterdir())


class _MakesTensor(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class _ReadsArray(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.array = numpy.arange(4, dtype=numpy.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.from_numpy(self.array)


@pytest.mark.parametrize("block", [_MakesTensor, _ReadsArray])
def test_step_that_reads_a_constant_tensor_or_numpy_array_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Callable[[int], Block]
) -> None:
    monkeypatch.setattr(bundle, "own_folder", lambda: tmp_path)
    with fake_world(2):
        assert trains_as_without(tmp_path / "step.bundle", block)
