"""`grad_dtype` and manual backward finalization (both since torch 2.15) match eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.models.blockwise import shard_blocks
from helpers.models.stacks import Block
from helpers.parity.twins import build_both
from helpers.ranks.tests import on_ranks

_BF16, _FP32 = torch.bfloat16, torch.float32


def _build(fully_shard: Any, prepare: Callable[[Any], None], policy: MixedPrecisionPolicy) -> Any:
    model: Any = nn.Sequential(Block(4), Block(4))
    prepare(model)
    return shard_blocks(model, fully_shard, mp_policy=policy)


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    loss: torch.Tensor = model(torch.randn(3, 4, dtype=model[0].up.weight.dtype)).square().mean()
    return loss


def _gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _all_in_fp32(model: Any) -> None:
    model.to(_BF16)
    for parameter in model.parameters():
        parameter.grad_dtype = _FP32


def _some_in_bf16(model: Any) -> None:
    for block in model:
        block.up.weight.grad_dtype = _BF16


def _any(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad_dtype = None


_POLICIES = {
    "own": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=_BF16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=_FP32),
}
_DTYPES = {each.__name__.strip("_"): each for each in (_all_in_fp32, _some_in_bf16, _any)}


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("dtypes", _DTYPES)
@on_ranks(2, since="2.15")
def test_gradients_match_eager_if_grad_dtype_is_set(rank: int, dtypes: str, policy: str) -> None:
    models = build_both(lambda shard: _build(shard, _DTYPES[dtypes], _POLICIES[policy]))
    for step in range(3):
        for model in models:
            model.set_requires_gradient_sync(step != 0)  # the first microbatch is not reduced
            _loss(model, step, rank).backward()
        if step == 0:
            continue
        for name, eager, ours in zip(dict(models[0].named_parameters()), *map(_gradients, models), strict=True):
            assert eager.dtype == ours.dtype and torch.equal(eager, ours), f"step {step}: {name}"


@on_ranks(2, since="2.15")
def test_manual_backward_finalization_matches_eager(rank: int) -> None:
    models = build_both(lambda shard: _build(shard, lambda model: None, MixedPrecisionPolicy()))
    for step in range(4):
        for model in models:
            model.set_manual_backward_finalization(True)
            for part in range(1 + step % 2):
                model.set_requires_gradient_sync(step % 2 == 0)
                _loss(model, 2 * step + part, rank).backward()
            model.set_requires_gradient_sync(True)
            if step == 3:
                model.finalize_backward(async_op=True).wait()
            else:
                model.finalize_backward()
        assert all(map(torch.equal, *map(_gradients, models))), step
        for model in models:
            model.zero_grad()
