"""User hooks on sharded modules run in eager FSDP2's order and see equal parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp.torch_compat.distributed import executed_collectives
from helpers.models.reference import Case
from helpers.models.sharded import unsharded_bytes
from helpers.parity.check import build, loss_of
from helpers.ranks.pools import run_ranks


def _watch(case: Case, seen: list[str]) -> None:
    """Register appended and prepended forward hooks and pre-hooks on a block and on the root."""

    def note(module: nn.Module, what: str) -> None:
        parameter = next(module.parameters())
        seen.append(f"{what} {tuple(parameter.shape)} {type(parameter).__name__ == 'DTensor'}")

    for name, module in (("block", case.blocks[0]), ("root", case.model)):
        module.register_forward_pre_hook(lambda m, args, name=name: note(m, f"before {name}"))
        module.register_forward_pre_hook(
            lambda m, args, name=name: note(m, f"before {name}, prepended"), prepend=True
        )
        module.register_forward_hook(lambda m, args, out, name=name: note(m, f"after {name}"))
        module.register_forward_hook(
            lambda m, args, out, name=name: note(m, f"after {name}, prepended"), prepend=True
        )


def _forward_hooks(rank: int) -> tuple[list[str], list[str]]:
    records = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        case = build("mlp", fully_shard)
        seen: list[str] = []
        _watch(case, seen)
        if fully_shard is compile_fsdp.fully_shard:
            case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        torch.manual_seed(rank)
        for _ in range(2):
            loss_of(case.model, case.batch()).backward()
        records.append(seen)
    return records[0], records[1]


def test_forward_hooks_run_as_in_eager() -> None:
    for eager, compiled in run_ranks(2, _forward_hooks):
        assert len(eager) == 16
        assert compiled == eager


def _gradients_equal(rank: int, case_name: str, configure: Callable[[Case], None]) -> list[bool]:
    """Return for each parameter whether eager and compiled steps with hooks give equal gradients."""
    results = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        case = build(case_name, fully_shard)
        configure(case)
        if fully_shard is compile_fsdp.fully_shard:
            case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        torch.manual_seed(rank)
        for _ in range(2):
            loss_of(case.model, case.batch()).backward()
        results.append([parameter.grad.full_tensor() for parameter in case.model.parameters()])  # type: ignore[union-attr]
    return [torch.equal(ours, eager) for eager, ours in zip(*results, strict=True)]


def _output_hooks(rank: int, name: str) -> list[bool]:
    """A forward hook that changes the output, and a tensor hook that scales its gradient."""

    def change(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output * 2.0
        if output.requires_grad:
            output.register_hook(lambda grad: grad * 0.5)
        return output

    return _gradients_equal(rank, name, lambda case: case.blocks[0].register_forward_hook(change))


@pytest.mark.parametrize("case", ["mlp", "nested"])
def test_hooks_that_change_outputs_and_gradients_match_eager(case: str) -> None:
    for equal in run_ranks(2, _output_hooks, case):
        assert all(equal)


def _module_backward_hooks(rank: int) -> list[bool]:
    """A full backward hook on a block that halves its input's gradient."""

    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] * 0.5,)

    return _gradients_equal(rank, "mlp", lambda case: case.blocks[1].register_full_backward_hook(halve))


def test_full_backward_hook_that_changes_gradients_matches_eager() -> None:
    for equal in run_ranks(2, _module_backward_hooks):
        assert all(equal)


class _Recomputed(nn.Module):
    """A checkpoint that begins with a frozen layer, with an untraceable gradient hook on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = checkpoint(lambda x: self.second(torch.tanh(self.first(x))).tanh(), x, use_reentrant=False)
        output.register_hook(_untraceable)
        return output.square().mean()


def _untraceable(grad: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return grad * 0.5


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _backward_op_by_op(rank: int) -> tuple[bool, list[str], int]:
    """Return whether gradients equal eager's, the log messages and the bytes that stay unsharded."""
    results = []
    messages, logger = _Messages(), logging.getLogger("compile_fsdp")
    logger.addHandler(messages)
    try:
        for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
            torch.manual_seed(0)
            model = _Recomputed()
            fully_shard(model.first)
            fully_shard(model.second)
            fully_shard(model)
            if fully_shard is compile_fsdp.fully_shard:
                model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
            torch.manual_seed(rank)
            for _ in range(2):
                model(torch.randn(3, 4)).backward()
            results.append([parameter.grad.full_tensor() for parameter in model.second.parameters()])  # type: ignore[union-attr]
    finally:
        logger.removeHandler(messages)
    return all(map(torch.equal, *results)), messages.texts, unsharded_bytes(model)


def test_backward_run_op_by_op_gathers_parameters_for_recomputation() -> None:
    for equal, messages, unsharded in run_ranks(2, _backward_op_by_op):
        assert equal
        assert unsharded == 0
        assert any("op by op" in message for message in messages)


class _Undo(RuntimeError):
    pass


def _optimizer_in_backward(rank: int) -> tuple[list[tuple[str, int]], bool, bool, str, bool]:
    """Run post-accumulate-grad hooks; return calls (parameter, collectives so far) and check results."""
    case = build("mlp", compile_fsdp.fully_shard)
    case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    names = {parameter: name for name, parameter in case.model.named_parameters()}
    calls: list[tuple[str, int]] = []
    kept: list[torch.Tensor] = []
    differentiable: list[bool] = []

    def hook(parameter: nn.Parameter) -> None:
        calls.append((names[parameter], executed_collectives()))
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        kept.append(grad.to_local())
        with torch.enable_grad():
            differentiable.append((grad.to_local() * torch.ones(1, requires_grad=True)).requires_grad)

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        calls.clear()
        kept.clear()
        case.model.zero_grad()
        torch.manual_seed(rank)
        loss_of(case.model, case.batch()).backward()
    expected = [parameter.grad.clone() for parameter in case.model.parameters()]
    second_step = list(calls)
    same = all(torch.equal(each, p.grad.to_local()) for each, p in zip(kept, _by_call(names, calls), strict=True))

    def fail(parameter: nn.Parameter) -> None:
        raise _Undo

    handle = next(iter(names)).register_post_accumulate_grad_hook(fail)
    raised = ""
    try:
        loss_of(case.model, case.batch()).backward()
    except _Undo:
        raised = "as itself"
    handle.remove()
    case.model.reset_iter_state()  # type: ignore[operator]
    case.model.zero_grad()
    torch.manual_seed(rank)
    loss_of(case.model, case.batch()).backward()
    recovered = all(torch.equal(p.grad, grad) for p, grad in zip(case.model.parameters(), expected, strict=True))
    return second_step, same, all(differentiable), raised, recovered


def _by_call(names: dict[Any, str], calls: list[tuple[str, int]]) -> list[Any]:
    parameters = {name: parameter for parameter, name in names.items()}
    return [parameters[name] for name, _ in calls]


def test_parameter_hooks_run_between_the_collectives_of_the_backward() -> None:
    for calls, same, differentiable, raised, recovered in run_ranks(2, _optimizer_in_backward):
        counts: dict[str, set[int]] = {}
        for name, count in calls:
            counts.setdefault(name[:8] if name.startswith("layers") else "root", set()).add(count)
        assert list(counts) == ["layers.1", "layers.0", "root"]
        (second,), (first,), (root,) = counts.values()
        assert second < first < root
        assert same and differentiable and recovered and raised == "as itself"
