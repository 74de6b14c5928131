"""After an exception anywhere in a step and `reset_iter_state()`, the next step is correct."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp.ops import collectives
from compile_fsdp.reports import count_captures
from helpers.models.sharded import unsharded_bytes
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.tests import on_ranks


class _Injected(RuntimeError):
    pass


KINDS = (_Injected, KeyboardInterrupt, torch.OutOfMemoryError)


class _Points:
    """Counts the failure points of a step, and raises at the armed point."""

    def __init__(self) -> None:
        self.passed = 0
        self.armed = -1

    def visit(self) -> None:
        self.passed += 1
        if self.passed == self.armed + 1:
            raise KINDS[self.armed % len(KINDS)](f"at point {self.armed}")

    @contextmanager
    def watch(self, armed: int = -1) -> Iterator[None]:
        self.passed, self.armed = 0, armed
        try:
            yield
        finally:
            self.armed = -1


_points = _Points()


def _failing(issue: Callable[..., object]) -> Callable[..., object]:
    """Wrap a compiled step's collective so that issuing it is a failure point."""

    def visit_and_issue(*args: Any, **kwargs: Any) -> object:
        _points.visit()
        return issue(*args, **kwargs)

    return visit_and_issue


@torch.library.custom_op("compile_fsdp_tests::point", mutates_args=())
def _point(x: torch.Tensor) -> torch.Tensor:
    """Identity op that is a failure point in the forward and in the backward."""
    _points.visit()
    return x.clone()


@_point.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_point.register_autograd(lambda ctx, grad: _point(grad))


class _Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6)
        self.checkpointed = checkpointed

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return _point(self.second(_point(torch.tanh(_point(self.first(x))))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x))


def _build(checkpointed: bool, reshard: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(checkpointed) for _ in range(4)), nn.Linear(6, 1))
    for block in model[:4]:
        # User hooks: failure points at the block's input and output and at their gradients.
        block.register_forward_pre_hook(lambda module, args: (_point(args[0]),))
        block.register_forward_hook(lambda module, args, output: _point(output))
        compile_fsdp.fully_shard(block, reshard_after_forward=reshard)
    compile_fsdp.fully_shard(model)
    return model


def _inject(rank: int, options: dict[str, Any] | None, checkpointed: bool, reshard: bool) -> list[str]:
    """Raise an exception at each failure point in turn; return the problems."""
    model = _build(checkpointed, reshard)
    if options is not None:
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: _points.visit())
    optimizer.register_step_post_hook(lambda *_: _points.visit())
    torch.manual_seed(rank)
    x = torch.randn(4, 6)

    def step(armed: int = -1) -> list[torch.Tensor]:
        with _points.watch(armed):
            model(x).square().mean().backward()
            optimizer.step()
        grads = [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad()
        return grads

    expected = step()
    expected_again, points = step(), _points.passed
    weights = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    graphs = count_captures()
    is_complete = points >= (40 if options is None else 43)
    wrong = [] if is_complete and all(map(torch.equal, expected, expected_again)) else [f"{points} points"]
    for armed in range(points):
        try:
            step(armed)
        except KINDS as error:
            if f"at point {armed}" not in str(error):
                wrong.append(f"{armed}: {error}")
        else:
            wrong.append(f"{armed}: nothing raised")
        model.reset_iter_state()  # type: ignore[operator]
        grads = [parameter.grad for parameter in model.parameters()]
        if not all(g is None or torch.equal(g.to_local(), e) for g, e in zip(grads, expected, strict=True)):
            wrong.append(f"{armed}: half a gradient")
        optimizer.zero_grad()
        if unsharded_bytes(model):
            wrong.append(f"{armed}: {unsharded_bytes(model)} unsharded bytes")
        if not all(torch.equal(value.to_local(), weights[name]) for name, value in model.state_dict().items()):
            wrong.append(f"{armed}: other weights")
        if not all(map(torch.equal, expected, step())):
            wrong.append(f"{armed}: other gradients in the next step")
    if count_captures() != graphs:
        wrong.append("compiled again")
    return wrong


@pytest.mark.parametrize(
    ("options", "checkpointed", "reshard"),
    [
        (None, False, True),
        (AOT_EAGER, False, True),
        (AOT_EAGER, True, True),
        pytest.param(AOT_EAGER, False, False, marks=pytest.mark.slow),
        pytest.param({}, False, True, marks=pytest.mark.slow),
        pytest.param({"memory_budget": 2**20}, False, True, marks=pytest.mark.slow),
    ],
    ids=["eager", "aot_eager", "checkpointed", "not resharded", "inductor", "kept"],
)
@on_ranks(2)
def test_model_recovers_from_every_exception(
    rank: int, options: dict[str, Any] | None, checkpointed: bool, reshard: bool
) -> None:
    names = ("_GATHER_INTO", "_REDUCE", "_send_and_receive")
    failing = {name: _failing(getattr(collectives, name)) for name in names}
    with mock.patch.multiple(collectives, **failing):
        assert _inject(rank, options, checkpointed, reshard) == []
