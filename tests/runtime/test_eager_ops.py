"""Eager ops between the graphs of a forward compute with parameters until their own backward has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.parameter import TraceableParam
from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import AOT_EAGER, build_both
from helpers.ranks.tests import on_ranks


@torch.compiler.disable
def _eagerly(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer(x)
    return out


class _Adapted(nn.Module):
    """A frozen layer and its adapter, as an adapter on a layer with a kernel that Dynamo does not trace."""

    def __init__(self, is_traced: bool) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.is_traced = is_traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_traced:
            return _eagerly(self.frozen, x) + self.adapter(x)  # type: ignore[no-any-return]
        hidden = self.frozen(x)
        torch._dynamo.graph_break()
        return hidden + self.adapter(x)  # type: ignore[no-any-return]


def _params(model: Any) -> list[TraceableParam]:
    return [param for block in model for group in module_hooks_of(block).hooks.groups for param in group.params]


# The input of the first block has no gradient.
@pytest.mark.parametrize(
    ("is_traced", "reshard_after_forward", "expected"),
    [
        (False, True, ["1.frozen.weight", "2.frozen.weight"]),
        (False, False, ["1.frozen.weight", "2.frozen.weight"]),
        (True, True, []),
    ],
)
@on_ranks(2)
def test_frozen_parameters_that_eager_ops_save_are_kept(
    rank: int, is_traced: bool, reshard_after_forward: bool, expected: list[str]
) -> None:
    def build(fully_shard: Any) -> Any:
        blocks = nn.Sequential(*(_Adapted(is_traced) for _ in range(3)))
        return shard_blocks(blocks, fully_shard, reshard_after_forward=reshard_after_forward)

    eager, ours = build_both(build, fullgraph=False, options=AOT_EAGER)
    result = Parity()
    for step in range(2):
        torch.manual_seed(2 * step + rank)
        x = torch.randn(4, 8)
        loss = ours(x).square().mean()
        assert [param.fsdp_param._param_fqn for param in _params(ours) if param.is_saved()] == expected
        loss.backward()
        of_eager = eager(x).square().mean()
        of_eager.backward()
        compare(result, f"step {step}: loss", loss.detach(), of_eager.detach())
        compare_grads(result, f"step {step}", ours, eager)
    assert result.differing == []
    assert not any(block._get_fsdp_state()._fsdp_param_group.is_unsharded for block in ours)
