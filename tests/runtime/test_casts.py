"""Mixed precision casts the inputs and outputs that eager FSDP2 casts, in every kind of container."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import build_both
from helpers.ranks.tests import on_ranks


@dataclass
class _Batch:
    x: torch.Tensor
    name: str = "batch"


class _Dict(dict):  # type: ignore[type-arg]
    pass


class _Record(OrderedDict):  # type: ignore[type-arg]
    @property
    def x(self) -> torch.Tensor:
        return self["x"]  # type: ignore[no-any-return]


class _Tuple(NamedTuple):
    x: torch.Tensor


CONTAINERS = {
    "dataclass": _Batch,
    "subclass of dict": _Dict,
    "ordered dict": OrderedDict,
    "subclass of ordered dict": _Record,
    "named tuple": _Tuple,
}


def _tensor_of(container: Any) -> torch.Tensor:
    is_dict = isinstance(container, dict) and not isinstance(container, _Record)
    return container["x"] if is_dict else container.x  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """Returns its result in a container of the class of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Any, kind: str) -> Any:
        return CONTAINERS[kind](x=self.linear(_tensor_of(batch)))


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = _Layer(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(CONTAINERS[self.kind](x=x), self.kind)
        return _tensor_of(output)


@pytest.mark.parametrize("kind", CONTAINERS)
@on_ranks(2)
def test_tensors_in_containers_are_cast_as_in_eager(rank: int, kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)

    def build(fully_shard: Any) -> Any:
        model = _Model(kind)
        fully_shard(model.layer, mp_policy=policy)
        return fully_shard(model)

    eager, ours = build_both(build)
    torch.manual_seed(rank)
    x, result = torch.randn(4, 8), Parity()
    outputs = [model(x) for model in (ours, eager)]
    assert outputs[0].dtype is outputs[1].dtype is torch.float32
    compare(result, "output", *(each.detach() for each in outputs))
    for output in outputs:
        output.square().mean().backward()
    compare_grads(result, "step", ours, eager)
    assert result.differing == []
