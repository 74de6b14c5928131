"""A warning names trainable parameters that no sharded module holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compile_fsdp
from helpers.logs import logged
from helpers.models.blockwise import compile_whole
from helpers.models.layers import Wrapper
from helpers.models.stacks import Stack
from helpers.ranks.fake_world import fake_world


def _warnings(model: nn.Module) -> list[str]:
    compile_whole(model, inner_backend="aot_eager")
    with logged() as messages:
        model(x=torch.randn(2, 8)).backward()
    return [message for message in messages if "not reduced" in message]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parameters_outside_of_sharded_modules_are_named(is_wrapped: bool) -> None:
    with fake_world(2):
        model = Stack(layers=1)
        compile_fsdp.fully_shard(model.layers[0])
        model.out.requires_grad_(False)
        (message,) = _warnings(Wrapper(model) if is_wrapped else model)
    prefix = "module." if is_wrapped else ""
    assert message.startswith(f"the gradients of {prefix}inp.weight, {prefix}inp.bias are not reduced")
    assert "call fully_shard() on the whole model as well" in message


def test_ignored_parameters_are_not_named() -> None:
    with fake_world(2):
        model = Stack(layers=1)
        compile_fsdp.fully_shard(model, ignored_params=set(model.inp.parameters()))
        assert not _warnings(model)


def test_one_rank_needs_no_reduction() -> None:
    with fake_world(1):
        model = Stack(layers=1)
        compile_fsdp.fully_shard(model.layers[0])
        assert not _warnings(model)
