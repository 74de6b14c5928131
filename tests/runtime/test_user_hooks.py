"""User hooks on sharded modules run in eager FSDP2's order and see equal parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp.torch_compat.distributed import executed_collectives
from helpers.logs import logged
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.reference import Case
from helpers.models.sharded import unsharded_bytes
from helpers.parity.check import build, loss_of
from helpers.parity.twins import AOT_EAGER, Twins, build_both
from helpers.ranks.fake_world import fake_world
from helpers.ranks.tests import on_ranks


def _watch(case: Case, seen: list[str]) -> None:
    """Register appended and prepended forward hooks and pre-hooks on a block and on the root."""

    def note(module: nn.Module, what: str) -> None:
        parameter = next(module.parameters())
        seen.append(f"{what} {tuple(parameter.shape)} {type(parameter).__name__ == 'DTensor'}")

    for name, module in (("block", case.blocks[0]), ("root", case.model)):
        module.register_forward_pre_hook(lambda m, args, name=name: note(m, f"before {name}"))
        module.register_forward_pre_hook(lambda m, args, name=name: note(m, f"before {name}, prepended"), prepend=True)
        module.register_forward_hook(lambda m, args, out, name=name: note(m, f"after {name}"))
        module.register_forward_hook(lambda m, args, out, name=name: note(m, f"after {name}, prepended"), prepend=True)


@on_ranks(2)
def test_forward_hooks_run_as_in_eager(rank: int) -> None:
    records: tuple[list[str], list[str]] = [], []
    twins = Twins(rank)
    for case, seen in zip((twins.eager, twins.ours), records, strict=True):
        _watch(case, seen)
    for _ in range(2):
        twins.train(update=False)
    eager, compiled = records
    assert len(eager) == 16
    assert compiled == eager


def _change_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Double the output, and halve its gradient in a tensor hook."""
    output = output * 2.0
    if output.requires_grad:
        output.register_hook(lambda grad: grad * 0.5)
    return output


@on_ranks(2)
def test_hooks_that_change_outputs_and_gradients_match_eager(rank: int) -> None:
    twins = Twins(rank, "nested")
    for case in (twins.eager, twins.ours):
        case.blocks[0].register_forward_hook(_change_output)
        case.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    for _ in range(2):
        twins.train(update=False)
    assert twins.result.differing == []


def _train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Return the trainable parameters' gradients of two backwards."""
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.randn(5, 4)).backward()
    return [each.grad.full_tensor() for each in model.parameters() if each.requires_grad]  # type: ignore[union-attr]


class _Block(nn.Module):
    """Reads its input three times; with `halves`, halves the gradient that they add up to."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.first, self.second, self.halves = nn.Linear(8, 8), nn.Linear(8, 8), halves

    def forward(self, x: torch.Tensor, same: torch.Tensor | None = None) -> torch.Tensor:
        if self.halves:
            x.register_hook(lambda grad: grad * 0.5)
        same = x if same is None else same
        return torch.tanh(self.first(x)) + self.second(same) * x


class _Skips(nn.Module):
    """Reads the inputs of its blocks again, as a U-Net does, and passes each `passes` times to its block."""

    def __init__(self, halves: bool, passes: int) -> None:
        super().__init__()
        self.embedding, self.passes = nn.Linear(4, 8), passes
        self.blocks = nn.ModuleList(_Block(halves) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.embedding(x)]
        for block in self.blocks:
            values.append(block(*values[-1:] * self.passes))
        return sum(value.sin() for value in reversed(values)).square().mean()  # type: ignore[union-attr, no-any-return]


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["", "cast"])
@pytest.mark.parametrize("passes", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("halves", [False, True], ids=["added", "halved"])
@on_ranks(2)
def test_gradients_of_a_modules_input_are_added_and_hooked_apart_from_a_skip_connections(
    rank: int, halves: bool, passes: int, param_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    models = build_both(lambda fully_shard: shard_blocks(_Skips(halves, passes), fully_shard, mp_policy=policy))
    assert all(map(torch.equal, *(_train(model, rank) for model in models)))


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


@on_ranks(2)
def test_backward_run_op_by_op_gathers_parameters_for_recomputation(rank: int) -> None:
    models = build_both(lambda fully_shard: shard_blocks(_Recomputed(), fully_shard))
    with logged() as messages:
        results = [_train(model, rank) for model in models]
    assert all(map(torch.equal, *results))
    assert unsharded_bytes(models[1]) == 0
    assert any("op by op" in message for message in messages)


class _Undo(RuntimeError):
    pass


@on_ranks(2)
def test_parameter_hooks_run_between_the_collectives_of_the_backward(rank: int) -> None:
    case = build("mlp", compile_fsdp.fully_shard)
    compile_whole(case.model, **AOT_EAGER)
    names = {parameter: name for name, parameter in case.model.named_parameters()}
    calls: list[tuple[nn.Parameter, int]] = []  # and the collectives so far
    kept: list[torch.Tensor] = []

    def hook(parameter: nn.Parameter) -> None:
        calls.append((parameter, executed_collectives()))
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        kept.append(grad.to_local())
        with torch.enable_grad():
            assert (grad.to_local() * torch.ones(1, requires_grad=True)).requires_grad

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        calls.clear()
        kept.clear()
        case.model.zero_grad()
        torch.manual_seed(rank)
        loss_of(case.model, case.batch()).backward()
    expected = [parameter.grad.clone() for parameter in case.model.parameters()]
    assert all(torch.equal(each, p.grad.to_local()) for each, (p, _) in zip(kept, calls, strict=True))
    counts: dict[str, set[int]] = {}
    for parameter, count in calls:
        name = names[parameter]
        counts.setdefault(name[:8] if name.startswith("layers") else "root", set()).add(count)
    assert list(counts) == ["layers.1", "layers.0", "root"]
    (second,), (first,), (root,) = counts.values()
    assert second < first < root

    def fail(parameter: nn.Parameter) -> None:
        raise _Undo

    handle = next(iter(names)).register_post_accumulate_grad_hook(fail)
    with pytest.raises(_Undo):
        loss_of(case.model, case.batch()).backward()
    handle.remove()
    case.model.reset_iter_state()  # type: ignore[operator]
    case.model.zero_grad()
    torch.manual_seed(rank)
    loss_of(case.model, case.batch()).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(case.model.parameters(), expected, strict=True))


def test_hooks_of_parameters_run_if_the_model_was_sharded_under_another_default_device() -> None:
    with fake_world(2):
        with torch.device("meta"):
            model = shard_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (2,)))
        model.to_empty(device="cpu")
        called: list[nn.Parameter] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(called.append)
        compile_whole(model, **AOT_EAGER)(torch.ones(2, 4)).sum().backward()
        assert {*called} == {*model.parameters()}
        assert all(parameter.grad is not None for parameter in called)


@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_full_backward_hooks_run_without_a_differentiable_input(rank: int, inner_backend: str) -> None:
    records: tuple[list[Any], list[Any]] = [], []

    def build(fully_shard: Any) -> Any:
        return shard_blocks(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)), fully_shard)

    for model, seen in zip(build_both(build, options={"inner_backend": inner_backend}), records, strict=True):

        def note(module: nn.Module, inputs: Any, outputs: Any, seen: list[Any] = seen) -> None:
            given = [None if each is None else each.tolist() for each in (*inputs, *outputs)]
            seen.append((type(module).__name__.removeprefix("FSDP"), given))

        for module in (*model, model):
            module.register_full_backward_hook(note)
        model[0].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
        torch.manual_seed(rank)
        for _ in range(2):
            model(torch.randint(0, 8, (3,))).square().mean().backward()
    eager, compiled = records
    assert len(eager) == 8
    assert [name for name, _ in compiled] == [name for name, _ in eager]
    for (_, found), (_, expected) in zip(compiled, eager, strict=True):
        assert [each is None for each in found] == [each is None for each in expected]
        for one, other in zip(filter(None, found), filter(None, expected), strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
