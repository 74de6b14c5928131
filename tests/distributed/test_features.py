"""Settings of fully_shard that have a traced counterpart train as they do eagerly, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from harness import run_ranks
from parity import Parity, train_both


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16 with fp32 reduction": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "fp16, divided before and after": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    "reshard after forward": {"reshard_after_forward": True},
    "keep after forward": {"reshard_after_forward": False},
    "columns": {"shard_placement_fn": _columns},
}


def _train(rank: int, setting: str) -> Parity:
    return train_both(rank, "mlp", "aot_eager", 5, **SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_eager(setting: str) -> None:
    for result in run_ranks(2, _train, setting):
        assert result.differing == []
        assert result.directions == ["forward", "backward"]
        assert result.compiled_after_first_step == 0
