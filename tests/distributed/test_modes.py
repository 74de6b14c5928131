"""Compiled and eager steps in any order train as eager FSDP2, because they share state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.models.reference import CASES
from helpers.parity.check import Parity, build, compare_grads, loss_of
from helpers.parity.twins import AOT_EAGER, Twins
from helpers.ranks.pools import run_ranks


def _eager_and_compiled_steps(rank: int) -> Parity:
    twins = Twins(rank)
    for compiled in (True, False, True, True, False, False, True):
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            twins.train()
    return twins.result


def _evaluation_between(rank: int) -> Parity:
    twins = Twins(rank)
    twins.evaluate(torch.no_grad)
    twins.train()
    twins.evaluate(torch.inference_mode)
    twins.evaluate(torch.no_grad)
    twins.train()
    twins.evaluate(torch.inference_mode)
    twins.train()
    return twins.result


def _inference_before_training(rank: int) -> Parity:
    # Only compile_fsdp's model runs inference first, because eager FSDP2 cannot train after it (2.13).
    twins = Twins(rank)
    with torch.inference_mode():
        loss_of(twins.ours.model, twins.batch())
    twins.train()
    twins.train()
    return twins.result


def _unshard_and_reshard(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train()
    for case in (twins.eager, twins.ours):
        case.model.unshard()
        case.blocks[0].unshard()
    twins.train()
    for case in (twins.eager, twins.ours):
        case.blocks[1].unshard()
        case.blocks[1].reshard()
    twins.train()
    return twins.result


def _state_dict_between(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train()
    saved = [
        {name: value.clone() for name, value in case.model.state_dict().items()}
        for case in (twins.eager, twins.ours)
    ]
    assert list(saved[0]) == list(saved[1])
    twins.train()
    twins.evaluate(torch.no_grad)
    for case, state in zip((twins.eager, twins.ours), saved, strict=True):
        case.model.load_state_dict(state)
    twins.train()
    for case, state in zip((twins.eager, twins.ours), saved, strict=True):
        case.model.load_state_dict({n: v.clone() for n, v in state.items()}, assign=True)
    twins.optimizers = [torch.optim.SGD(c.model.parameters(), lr=0.1) for c in (twins.eager, twins.ours)]
    twins.train()
    return twins.result


def _accumulation(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train(update=False)
    twins.train()
    for sync in (False, True):
        for case in (twins.eager, twins.ours):
            case.model.set_requires_gradient_sync(sync)
        twins.train(update=sync)
    twins.train()
    return twins.result


def _recompile_limit(rank: int) -> Parity:
    twins = Twins(rank, fullgraph=False, dynamic=False)
    rows = iter([4, 5, 6, 7, 4, 8])
    twins.eager.batch = lambda: {"x": torch.randn(next(rows), 8)}  # type: ignore[method-assign]
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(6):
            twins.train()
    return twins.result


def _changing_batch_sizes(rank: int) -> Parity:
    twins = Twins(rank)
    for rows in (4, 6, 5, 9, 4):
        twins.eager.batch = lambda rows=rows: {"x": torch.randn(rows, 8)}  # type: ignore[method-assign, misc]
        twins.train()
    # Once for the first size and once for any size. Compiled autograd compiles the second size as static once more.
    directions = [report.direction for report in compile_fsdp.reports()]
    assert directions == ["forward", "backward"] * 2 + ["backward"], directions
    return twins.result


def _freezing_between(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train()
    for trainable in (False, True):
        for case in (twins.eager, twins.ours):
            case.blocks[0].requires_grad_(trainable)
        twins.train()
        twins.train()
    return twins.result


def _frozen_values_change_between(rank: int, is_listed: bool) -> Parity:
    twins = Twins(rank, "frozen_first")
    for case in (twins.eager, twins.ours):
        if is_listed:
            frozen, trained = case.blocks
            trained.set_modules_to_backward_prefetch([frozen])
    twins.train()
    for _ in range(2):
        # The next step must not use a copy of the frozen block that a backward gathered before this change.
        for case in (twins.eager, twins.ours):
            with torch.no_grad():
                for parameter in case.blocks[0].parameters():
                    parameter.mul_(1.5)
        twins.train()
    assert len(compile_fsdp.reports()) == 2
    return twins.result


def _frozen_values_change(rank: int) -> Parity:
    return _frozen_values_change_between(rank, is_listed=False)


def _frozen_and_prefetched_values_change(rank: int) -> Parity:
    return _frozen_values_change_between(rank, is_listed=True)


def _backward_in_force_eager(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train()
    batch = twins.batch()
    losses = [loss_of(case.model, batch) for case in (twins.eager, twins.ours)]
    with torch.compiler.set_stance("force_eager"):
        for loss in losses:
            loss.backward()
    compare_grads(twins.result, "backward under force_eager", twins.ours.model, twins.eager.model)
    return twins.result


# `make test` covers the slow programs elsewhere: test_memory_budget.py and test_settings.py evaluate between steps,
# test_dynamic.py changes sizes, and test_features.py freezes and loads state dicts between steps.
@pytest.mark.parametrize(
    "program",
    [
        _eager_and_compiled_steps,
        pytest.param(_evaluation_between, marks=pytest.mark.slow),
        pytest.param(_inference_before_training, marks=pytest.mark.slow),
        _unshard_and_reshard,
        pytest.param(_state_dict_between, marks=pytest.mark.slow),
        _accumulation,
        _recompile_limit,
        pytest.param(_changing_batch_sizes, marks=pytest.mark.slow),
        pytest.param(_freezing_between, marks=pytest.mark.slow),
        _frozen_values_change,
        _frozen_and_prefetched_values_change,
        _backward_in_force_eager,
    ],
    ids=lambda program: program.__name__.removeprefix("_"),
)
def test_bitwise_equal_to_eager(program: Callable[[int], Parity]) -> None:
    for result in run_ranks(2, program):
        assert result.differing == []


def _ways_to_compile(rank: int, way: str) -> Parity:
    twins = Twins(rank)
    model = twins.ours.model
    model._compiled_call_impl = None  # type: ignore[assignment]  # undo Twins' own compile
    if way == "torch.compile":
        compiled = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    else:

        @torch.compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        def compiled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return model(x * 2.0, y) / 2.0

        inner = twins.eager.model
        twins.eager.model = _Outer(inner)
    twins.ours.model = _Called(model, compiled)
    for _ in range(3):
        twins.train()
    twins.result.directions = [report.direction for report in compile_fsdp.reports()]
    return twins.result


class _Called(nn.Module):
    def __init__(self, model: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


class _Outer(_Called):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lambda x, y: model(x * 2.0, y) / 2.0)


@pytest.mark.parametrize("way", ["torch.compile", "outer function"])
def test_each_way_to_compile_makes_one_forward_and_one_backward_graph(way: str) -> None:
    for result in run_ranks(2, _ways_to_compile, way):
        assert result.differing == []
        assert result.directions == ["forward", "backward"]


def _made_traceable(rank: int) -> Parity:
    twins = Twins(rank)
    twins.ours = build("mlp", torch_fully_shard)
    assert compile_fsdp.make_traceable(twins.ours.model) is twins.ours.model
    compile_fsdp.make_traceable(twins.ours.model)
    twins.ours.model.compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    twins.optimizers[1] = torch.optim.SGD(twins.ours.model.parameters(), lr=0.1)
    for _ in range(3):
        twins.train()
    twins.result.directions = [report.direction for report in compile_fsdp.reports()]
    return twins.result


def test_make_traceable_model_is_bitwise_equal_to_eager() -> None:
    for result in run_ranks(2, _made_traceable):
        assert result.differing == []
        assert result.directions == ["forward", "backward"]


def _input_gradients(rank: int) -> tuple[bool, bool]:
    twins = Twins(rank)
    torch.manual_seed(rank)
    leaf = torch.randn(4, 8)
    grads = []
    for case in (twins.eager, twins.ours):
        x = leaf.clone().requires_grad_()
        hidden = x * 3.0
        case.model(hidden).backward()
        grads.append(x.grad)
    assert grads[0] is not None and grads[1] is not None
    return torch.equal(grads[0], grads[1]), bool(grads[0].abs().sum() > 0)


def test_input_gradients_are_bitwise_equal_to_eager() -> None:
    assert run_ranks(2, _input_gradients) == [(True, True)] * 2


def _world_of_one(rank: int) -> Parity:
    twins = Twins(rank)
    for _ in range(3):
        twins.train()
    return twins.result


def test_single_rank_is_bitwise_equal_to_eager() -> None:
    assert run_ranks(1, _world_of_one)[0].differing == []


def _eager(rank: int, case_name: str) -> list[str]:
    cases = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        cases.append(CASES[case_name]())
        batch = cases[0].batch()
        for module in (*cases[-1].blocks, cases[-1].model):
            fully_shard(module)
    torch_case, ours = cases
    result = Parity()
    for case in cases:
        for _ in range(2):  # the second backward accumulates
            (loss_of(case.model, batch) * (rank + 1)).backward()
    compare_grads(result, "gradients", ours.model, torch_case.model)
    assert all(parameter.grad is not None for parameter in ours.model.parameters() if parameter.requires_grad)
    return result.differing


@pytest.mark.parametrize("case", ["mlp", "nested", "uneven", "frozen", "transformer_tied", "batch_norm"])
def test_uncompiled_model_has_the_gradients_of_torch_fsdp2(case: str) -> None:
    assert run_ranks(3, _eager, case) == [[]] * 3
