"""Training steps behind an evaluation, which leaves the root unsharded, equal eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.parity.check import full
from helpers.ranks.pools import device_type, run_ranks

WIDTH = 8


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class _Training:
    """Each method is one action of a loop."""

    def __init__(self, shard: Callable[..., nn.Module], rank: int) -> None:
        torch.manual_seed(0)
        self.model = _Model().to(device_type())
        for block in self.model.blocks:
            shard(block)
        shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(4, WIDTH, device=device_type()) + rank
        self.losses: list[torch.Tensor] = []

    def train(self) -> None:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.losses.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.model(self.batch).mean())

    def freeze_head(self) -> None:
        self.model.head.requires_grad_(False)


def _differences(rank: int, actions: tuple[str, ...]) -> list[float]:
    """Return the differences of losses and parameters to eager FSDP2."""
    eager, ours = (_Training(shard, rank) for shard in (torch_fully_shard, compile_fsdp.fully_shard))
    ours.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    for training in (eager, ours):
        for action in actions:
            getattr(training, action)()
    pairs = [*zip(ours.losses, eager.losses, strict=True)]
    pairs += [(full(a), full(b)) for a, b in zip(ours.model.parameters(), eager.model.parameters(), strict=True)]
    return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize(
    "actions",
    [
        ("train", "evaluate", "step", "train", "step"),  # eager FSDP2 trains with the head of the evaluation
        ("train", "step", "evaluate", "evaluate", "step", "train", "step"),
        ("train", "step", "evaluate", "freeze_head", "train", "step", "train", "step"),
    ],
)
def test_changes_behind_an_evaluation_count_as_in_eager_steps(actions: tuple[str, ...]) -> None:
    for differences in run_ranks(2, _differences, actions):
        assert not any(differences)
