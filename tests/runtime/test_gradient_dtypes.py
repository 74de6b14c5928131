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
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before

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


def _with_dtypes(rank: int, dtypes: str, policy: str) -> list[str]:
    models = build_both(lambda shard: _build(shard, _DTYPES[dtypes], _POLICIES[policy]))
    wrong = []
    for step in range(3):
        for model in models:
            model.set_requires_gradient_sync(step != 0)  # the first microbatch is not reduced
            _loss(model, step, rank).backward()
        if step == 0:
            continue
        for name, eager, ours in zip(dict(models[0].named_parameters()), *map(_gradients, models), strict=True):
            if eager.dtype != ours.dtype or not torch.equal(eager, ours):
                wrong.append(f"step {step}: {name}: {ours.dtype}, {(eager - ours).abs().max()}")
    return wrong


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("dtypes", _DTYPES)
def test_gradients_match_eager_if_grad_dtype_is_set(dtypes: str, policy: str) -> None:
    skip_before("2.15")
    assert run_ranks(2, _with_dtypes, dtypes, policy) == [[], []]


def _by_hand(rank: int) -> list[str]:
    models = build_both(lambda shard: _build(shard, lambda model: None, MixedPrecisionPolicy()))
    wrong = []
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
        if not all(map(torch.equal, *map(_gradients, models))):
            wrong.append(f"step {step}")
        for model in models:
            model.zero_grad()
    return wrong


def test_manual_backward_finalization_matches_eager() -> None:
    skip_before("2.15")
    assert run_ranks(2, _by_hand) == [[], []]
