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
from helpers.ranks.tests import on_ranks

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


# Own bundles are one for each rank; other bundles are for all ranks.
@pytest.mark.parametrize(
    ("kind", "is_own"), [*((kind, True) for kind in RANK_READERS), ("rank", False), ("alias", False)]
)
@on_ranks(2)
def test_step_that_reads_its_rank_is_replayed_by_this_rank_only(
    rank: int, tmp_path: Path, kind: str, is_own: bool
) -> None:
    (_, (forwards, _)), _, are_equal = restart(str(tmp_path), is_own, RANK_READERS[kind])
    assert (forwards, are_equal) == (3 if is_own else 0, True)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == (2 if is_own else 0)


class _ReadsCoordinate(_ReadsPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) * (1 + self.mesh.get_coordinate()[0])  # type: ignore[index]


@on_ranks(2)
def test_place_in_a_mesh_is_a_condition(rank: int, tmp_path: Path) -> None:
    """A model starts twice, and once with a mesh of other ranks."""
    bundle.own_folder = lambda: tmp_path
    for ranks in ([0, 1], [0, 1], [1, 0]):
        assert trains_as_without(None, partial(_ReadsCoordinate, ranks=ranks))


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


@pytest.mark.parametrize("kind", ASSUMING)
@on_ranks(1)
def test_results_that_are_assumed_constant_are_in_no_bundle(rank: int, tmp_path: Path, kind: str) -> None:
    for factor in (2.0, 3.0):
        _factors.append(factor)
        assert trains_as_without(tmp_path / "step.bundle", ASSUMING[kind])
    assert not list(tmp_path.iterdir())


class _CallsMethod(Block):
    """Calls a method of C that the module, or a dict in it, holds."""

    def __init__(self, width: int, method: Any, is_in_dict: bool) -> None:
        super().__init__(width)
        self.held = {"method": method} if is_in_dict else method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        method = self.held["method"] if isinstance(self.held, dict) else self.held
        return method(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_in_dict", [False, True])
@on_ranks(1)
def test_method_of_c_is_a_condition(rank: int, tmp_path: Path, is_in_dict: bool) -> None:
    bundle.own_folder = lambda: tmp_path
    for method in (torch.Tensor.tanh, torch.Tensor.exp):
        assert trains_as_without(None, partial(_CallsMethod, method=method, is_in_dict=is_in_dict))


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
