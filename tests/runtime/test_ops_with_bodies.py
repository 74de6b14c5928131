"""Modules with conditions, scans and FlexAttention train as eager FSDP2 trains them, with reductions in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention import flex_attention

from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import build_both
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before


class _Body(nn.Module):
    """Runs an op with a body between two linear layers."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.op = nn.Linear(8, 8), nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(x + self.op(self.first(x)))
        return out


def _choose(x: torch.Tensor) -> torch.Tensor:
    chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return chosen


def _scan(x: torch.Tensor) -> torch.Tensor:
    def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return carried * 0.5 + row, torch.relu(carried + row * 2)

    _, rows = scan(step, torch.zeros_like(x[0]), x)
    return rows


def _is_causal(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, 1, *x.shape)
    mask = flex_attention.create_block_mask(_is_causal, None, None, len(x), len(x), device="cpu")
    attended = flex_attention.flex_attention(heads, heads, heads, block_mask=mask)
    assert isinstance(attended, torch.Tensor)
    return attended.view(x.shape)


# FSDP2's own function that reduces the gradients of a group.
_EAGER_REDUCTION = "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce"

_OPS = {"cond": _choose, "scan": _scan, "flex_attention": _attend}


def _train(rank: int, name: str, inner_backend: str) -> Parity:
    def build(fully_shard: Any) -> nn.Module:
        model: nn.Module = shard_blocks(nn.Sequential(*(_Body(_OPS[name]) for _ in range(2))), fully_shard)
        return model

    eager, ours = build_both(build, options={"inner_backend": inner_backend})
    result = Parity()
    # Torch trains FlexAttention on GPUs only. Op by op, it also works on a CPU.
    with mock.patch.object(flex_attention, "_validate_device", lambda *_: None):
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            x = torch.randn(4, 8)
            with mock.patch(_EAGER_REDUCTION) as reduce_eagerly:
                loss = ours(x).square().mean()
                loss.backward()
            if reduce_eagerly.called:
                result.fail(f"step {step}: eager code reduced the gradients")
            expected = eager(x).square().mean()
            expected.backward()
            compare(result, f"step {step}: loss", loss.detach(), expected.detach())
            compare_grads(result, f"step {step}", ours, eager)
    return result


@pytest.mark.parametrize("name", _OPS)
def test_trains_bitwise_with_reductions_in_the_graph(name: str) -> None:
    if name == "scan":
        skip_before("2.12")  # which cannot trace the backward of a scan op by op
    for result in run_ranks(2, _train, name, "aot_eager"):
        assert result.differing == []


def test_inductor_compiles_the_body_of_a_scan() -> None:
    for result in run_ranks(2, _train, "scan", "inductor"):
        assert result.worst < 1e-5
