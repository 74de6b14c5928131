"""Estimated peaks against what training allocates: on real ranks, and in worlds of any size without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from compile_fsdp.tools.bench.llama import ModelConfig, Transformer
from compile_fsdp.tools.planning import Backend, Estimate, Optimizer, estimate
from compile_fsdp.wrap import plan
from helpers.ranks.fake_world import fake_world
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.peaks import adamw, peak_bytes
from helpers.ranks.pools import device_type, run_ranks
from helpers.releases.differences import ALLOCATES_GRADIENTS_OTHERWISE


class UnevenBlock(nn.Module):
    """A block of odd sizes, of which neither 2 nor 4 is a divisor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(333), nn.Linear(333, 1001), nn.Linear(1001, 333)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Uneven(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(3))
        self.head = nn.Linear(333, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        loss: torch.Tensor = self.head(x).logsumexp(-1).mean()
        return loss


def tokens(batch: int, seq_len: int) -> dict[str, Any]:
    return {name: torch.zeros(batch, seq_len, dtype=torch.int64) for name in ("tokens", "targets")}


def rows(batch: int, seq_len: int) -> dict[str, Any]:
    return {"x": torch.zeros(batch, seq_len, 333)}


def transformer() -> nn.Module:
    return Transformer(ModelConfig(dim=256, layers=3, heads=4, hidden=704), seq_len=128)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), foreach=False)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)


@dataclass
class Training:
    """What is estimated, and run.

    Attributes:
        kwargs: Of `fully_shard`.
        prefetch: Of `estimate` and of the model.
        size: Sequences, and tokens of each.
        replicas: Sets of ranks that each hold all parameters.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Any]]
    size: tuple[int, int]
    kwargs: dict[str, Any] = field(default_factory=dict)
    prefetch: dict[str, int] = field(default_factory=dict)
    optimizer: tuple[Optimizer, Callable[[nn.Module], torch.optim.Optimizer]] = (Optimizer.ADAMW, adamw)
    replicas: int = 1

    def plan(self, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return plan(self.model(), **self.kwargs, **kwargs)

    def estimate(self, backend: Backend) -> Estimate:
        return estimate(
            self.plan(),
            self.batch,
            near=self.size,
            optimizer=self.optimizer[0],
            backend=backend,
            replicas=self.replicas,
            **self.prefetch,
        )

    def measured(self) -> int:
        kwargs = {}
        if self.replicas > 1:
            shape = (self.replicas, dist.get_world_size() // self.replicas)
            kwargs["mesh"] = shared_mesh(device_type(), shape, ("replicate", "shard"))
        return peak_bytes(
            lambda: self.plan(**kwargs), lambda: self.batch(*self.size), self.optimizer[1], **self.prefetch
        )


LOW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TRAININGS = {
    "transformer": Training(transformer, tokens, (2, 128)),
    # Parameters and gradients outweigh activations.
    "few tokens": Training(transformer, tokens, (2, 16)),
    "bfloat16": Training(transformer, tokens, (2, 32), {"mp_policy": BF16}),
    "kept": Training(transformer, tokens, (2, 32), {"reshard_after_forward": False}),
    "two ahead": Training(transformer, tokens, (2, 16), prefetch={"forward_prefetch": 2, "backward_prefetch": 2}),
    "sgd": Training(transformer, tokens, (3, 64), optimizer=(Optimizer.SGD, sgd)),
    "momentum": Training(transformer, tokens, (3, 64), optimizer=(Optimizer.SGD_MOMENTUM, momentum)),
    # Gradients are reduced in another dtype than they are kept in.
    "replicas": Training(transformer, tokens, (2, 16), {"mp_policy": LOW}, replicas=2),
    "uneven": Training(Uneven, rows, (2, 128)),
    "uneven, few rows": Training(Uneven, rows, (2, 8)),
    "checkpointed": Training(lambda: Uneven(checkpointed=True), rows, (4, 256)),
}


ON_REAL_RANKS = ["transformer", "few tokens", "bfloat16", "uneven", "uneven, few rows"]


def _slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


# `make test` leaves to `make test-all` what real ranks show, too, and there four ranks but for one row.
# What is prefetched has a row on an accelerator; a momentum is half of what AdamW keeps.
ELSEWHERE = [*ON_REAL_RANKS, "two ahead", "momentum"]


@pytest.mark.parametrize("name", [*(name for name in TRAININGS if name not in ELSEWHERE), *_slow(ELSEWHERE)])
def test_peak_without_communication(name: str) -> None:
    """What is left are counters of the optimizer and other small tensors between the operations."""
    if ALLOCATES_GRADIENTS_OTHERWISE and name in ("kept", "replicas", "bfloat16"):
        pytest.xfail("plan counts the gradients of eager FSDP2 before torch 2.15: see docs/compatibility.md")
    training = TRAININGS[name]
    found = training.estimate(Backend.FAKE)
    for ranks in (2, 3, 64):
        with fake_world(ranks * training.replicas):
            measured = training.measured()
        assert found.at(ranks, *training.size)["peak"] == pytest.approx(measured, rel=1e-3)


def _measure(rank: int, name: str, expected: int) -> int:
    """The smallest of at most 12 runs: gloo's threads may hold on to the tensors of collectives that are over.

    On a busy machine they do so in two of three runs.
    """
    smallest = torch.tensor(torch.iinfo(torch.int64).max)
    for _ in range(12):
        smallest = torch.minimum(smallest, torch.tensor(TRAININGS[name].measured()))
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        if smallest <= expected:
            break
    return int(smallest)


def _measure_on_device(rank: int, name: str) -> int:
    return TRAININGS[name].measured()


@pytest.mark.parametrize("name", ["few tokens", "two ahead", *_slow(["transformer", "bfloat16", "kept", "uneven"])])
def test_peak_of_an_accelerator(name: str) -> None:
    """Its allocator hands out multiples of 512 bytes, and its process group makes no copies, like NCCL."""
    training = TRAININGS[name]
    peak = training.estimate(Backend.NCCL).at(2, *training.size)["peak"]
    for measured in run_ranks(2, _measure_on_device, name, device="emulated"):
        assert peak == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in ON_REAL_RANKS), ("uneven", 4)]
    + [pytest.param("replicas", 4, marks=pytest.mark.slow)]
    + [pytest.param(name, 4, marks=pytest.mark.slow) for name in ON_REAL_RANKS if name != "uneven"],
)
def test_peak_of_real_ranks(name: str, ranks: int) -> None:
    training = TRAININGS[name]
    peak = training.estimate(Backend.GLOO).at(ranks // training.replicas, *training.size)["peak"]
    assert peak == pytest.approx(run_ranks(ranks, _measure, name, int(1.01 * peak))[0], rel=0.05)
