"""A warning names trainable parameters that no sharded module holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compile_fsdp
from helpers.logs import logged
from helpers.ranks.fake_world import fake_world


class _Model(nn.Module):
    """Three layers. Dynamo would not compile a plain `nn.Sequential` whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _warnings(model: nn.Module) -> list[str]:
    model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    with logged() as messages:
        model(torch.randn(2, 4)).sum().backward()
    return [message for message in messages if "not reduced" in message]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parameters_outside_of_sharded_modules_are_named(is_wrapped: bool) -> None:
    with fake_world(2):
        model = _Model()
        compile_fsdp.fully_shard(model.block)
        model.last.requires_grad_(False)
        (message,) = _warnings(_Wrapper(model) if is_wrapped else model)
    prefix = "inner." if is_wrapped else ""
    assert message.startswith(f"the gradients of {prefix}first.weight, {prefix}first.bias are not reduced")
    assert "call fully_shard() on the whole model as well" in message


def test_ignored_parameters_are_not_named() -> None:
    with fake_world(2):
        model = _Model()
        compile_fsdp.fully_shard(model, ignored_params=set(model.first.parameters()))
        assert not _warnings(model)


def test_one_rank_needs_no_reduction() -> None:
    with fake_world(1):
        model = _Model()
        compile_fsdp.fully_shard(model.block)
        assert not _warnings(model)
