"""Parts of a weight that no gather brings, such as tables of 4-bit formats, are right in compiled and eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.tests import on_ranks

_aten = torch.ops.aten
_KEEPING = {
    *(_aten.alias.default, _aten.as_strided.default, _aten.clone.default, _aten.detach.default, _aten.view.default),
    *(_aten.new_zeros.default, _aten.slice.Tensor),
}


class _Codes(torch.Tensor):
    """A weight of codes, which are gathered, and a table, which is metadata: `table[codes]`."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, table: torch.Tensor) -> _Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.size(), dtype=table.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, table: torch.Tensor) -> None:
        self.codes, self.table = codes, table

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "table"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> _Codes:
        return cls(inner["codes"], inner["table"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codes}, {self.table})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is _aten.split.Tensor:
            return [cls(each, own.table) for each in func(own.codes, *args[1:])]
        if func in _KEEPING:
            return cls(func(own.codes, *args[1:]), own.table)
        assert func is _aten.copy_.default
        own.codes.copy_(args[1].codes)
        return own

    def value(self) -> torch.Tensor:
        return self.table[self.codes.long()]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.codes,), (self.table,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        # `out` has the gathered codes already, and the table that the first gather gave it.
        return None if out is not None else (type(self)(gathered[0], metadata[0]), (gathered[0],))


class _WritesTable(_Codes):
    """Gathers a table that changes, and writes it into `out` each time."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.codes,), (self.table * 2,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            out.table.copy_(metadata[0])
        return super().fsdp_post_all_gather(gathered, metadata, dtype, out=out)


class _Adapter(nn.Module):
    """A trainable layer beside a frozen weight of codes."""

    def __init__(self, kind: type[_Codes]) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind(torch.arange(64, dtype=torch.uint8).view(8, 8) % 7, torch.randn(7)), False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.weight.value().t()  # type: ignore[no-any-return, operator]


def _results(fully_shard: Any, writes_table: bool, eager_first: bool, loads: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    kind = _WritesTable if writes_table else _Codes
    model = nn.Sequential(_Adapter(kind), _Adapter(kind))
    for module in (*model, model):
        fully_shard(module)
    x, results = torch.linspace(-1, 1, 32).view(4, 8), []
    if eager_first:
        results.append(model(x).detach())
    if fully_shard is compile_fsdp.fully_shard:
        model.compile(backend="compile_fsdp", fullgraph=True, options=dict(AOT_EAGER))
    for step in range(3):
        loss = model(x).square().mean()
        loss.backward()
        gradients = [each.grad.to_local() for each in model.parameters() if each.grad is not None]
        results += [loss.detach(), *gradients]
        model.zero_grad()
        if loads and step == 1:
            for each in model:
                each.weight.to_local().table.mul_(1.5)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            results.append(model(x))
    return results


@pytest.mark.parametrize(
    ("writes_table", "eager_first", "loads"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@on_ranks(2)
def test_table_is_right_in_compiled_and_eager_steps(
    rank: int, writes_table: bool, eager_first: bool, loads: bool
) -> None:
    eager = _results(torch_fully_shard, writes_table, eager_first, loads)
    ours = _results(compile_fsdp.fully_shard, writes_table, eager_first, loads)
    assert [(one - other).abs().max().item() for one, other in zip(eager, ours, strict=True)] == [0.0] * len(ours)
