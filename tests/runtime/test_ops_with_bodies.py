"""Modules with conditions train as eager FSDP2 trains them, or are refused where Dynamo loses the state of FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_fsdp.tools.launch import RankError
from compile_fsdp.torch_compat.dynamo_limits import LOSES_STATE_BEHIND_BODIES
from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import build_both
from helpers.ranks.pools import run_ranks


class _Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        chosen: torch.Tensor = torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))
        return x + chosen


def _train(rank: int) -> Parity:
    eager, ours = build_both(lambda fully_shard: shard_blocks(nn.Sequential(_Chooses(), _Chooses()), fully_shard))
    result = Parity()
    for step in range(2):
        torch.manual_seed(2 * step + rank)
        x = torch.randn(4, 8)
        losses = [model(x).square().mean() for model in (ours, eager)]
        for loss in losses:
            loss.backward()
        compare(result, f"step {step}: loss", *losses)
        compare_grads(result, f"step {step}", ours, eager)
    return result


def test_conditions_train_bitwise_or_are_refused() -> None:
    if LOSES_STATE_BEHIND_BODIES:
        with pytest.raises(RankError, match="expected a forward without cond, because Dynamo of torch"):
            run_ranks(2, _train)
        return
    for result in run_ranks(2, _train):
        assert result.differing == []
