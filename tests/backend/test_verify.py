"""The `verify` option accepts correct graphs and raises on wrong graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import compile_fsdp
from compile_fsdp.backend.verify import difference, tolerance_of
from compile_fsdp.errors import VerificationError
from helpers.models.blockwise import compile_whole
from helpers.parity.check import Parity, build, loss_of
from helpers.parity.twins import Twins
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks

aten = torch.ops.aten


def _train(rank: int, case: str, inner_backend: str) -> Parity:
    twins = Twins(rank, case, options={"inner_backend": inner_backend, "verify": True}, fullgraph=case != "graph_break")
    for _ in range(3):
        twins.train()
    return twins.result


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("transformer_tied", "graph_break")]


@pytest.mark.parametrize("case", ["batch_norm", "frozen_checkpoint", *SLOW])
@on_ranks(2)
def test_verified_models_match_eager_fsdp2(rank: int, case: str) -> None:
    assert _train(rank, case, "aot_eager").differing == []
    assert len(compile_fsdp.reports()) >= 2


@pytest.mark.slow
@on_ranks(2)
def test_verified_inductor_model_is_close_to_eager_fsdp2(rank: int) -> None:
    assert _train(rank, "mlp", "inductor").worst < 1e-5
    assert len(compile_fsdp.reports()) == 2


def _wrong_backend(wrong_graph: int, rank: int) -> str:
    """Register a backend that computes one graph wrong on rank 1."""
    compiled: list[fx.GraphModule] = []

    def compile_wrongly(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(gm)
        if rank == 1 and len(compiled) == wrong_graph + 1:
            products = (nn.functional.linear, torch.mm, aten.mm.default)
            node = next(node for node in reversed(gm.graph.nodes) if node.target in products)
            with gm.graph.inserting_after(node):
                wrong = gm.graph.call_function(torch.mul, (node, 1.01))
            node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
            gm.recompile()
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    name = f"wrong_{len(torch._dynamo.list_backends(()))}"
    torch._dynamo.register_backend(compile_wrongly, name=name)
    return name


def _train_wrongly(rank: int, wrong_graph: int, verify: bool) -> tuple[str, list[str]]:
    case = build("mlp", compile_fsdp.fully_shard)
    compile_whole(case.model, inner_backend=_wrong_backend(wrong_graph, rank), verify=verify)
    try:
        loss_of(case.model, case.batch()).backward()
    except VerificationError as error:
        message = str(error)
    else:
        return "", []
    case.model.reset_iter_state()
    case.model.zero_grad()
    twins = Twins(rank)
    twins.train()
    return message, twins.result.differing


@pytest.mark.parametrize(("wrong_graph", "direction"), [(0, "forward"), (1, "backward")])
def test_wrong_graph_on_one_rank_raises_on_all_ranks(wrong_graph: int, direction: str) -> None:
    (first, _), (second, _) = results = run_ranks(2, _train_wrongly, wrong_graph, True)
    assert first == second
    assert f"expected the compiled {direction} graph to equal the traced graph" in first
    assert "differs by" in first
    assert [differing for _, differing in results] == [[], []]


def test_wrong_graph_is_not_detected_without_verify() -> None:
    assert run_ranks(2, _train_wrongly, 0, False) == [("", [])] * 2


class _Other(nn.Linear):
    """Linear layer whose compiled output is wrong on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 1.01 if torch.compiler.is_compiling() and torch.distributed.get_rank() == 1 else y


def _train_otherwise(rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Other(4, 4), nn.BatchNorm1d(4))
    for module in (model[0], model[1], model):
        compile_fsdp.fully_shard(module)
    compile_whole(model, inner_backend="aot_eager", verify=True)
    loss = (model(torch.randn(3, 4)) * torch.randn(3, 4)).sum()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(VerificationError) as error:
        loss.backward()
    unchanged = all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    return str(error.value), unchanged


def test_step_that_differs_from_eager_fsdp2_raises_on_all_ranks() -> None:
    results = run_ranks(2, _train_otherwise)
    assert results[0][0] == results[1][0]
    assert "expected the gradients of torch's eager FSDP2, but the gradient of " in results[0][0]
    assert all(unchanged for _, unchanged in results)


class _LossAndLogits(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"logits": logits, "loss": logits.square().mean()}


@on_ranks(2)
def test_verify_ignores_outputs_without_a_gradient(rank: int) -> None:
    torch.manual_seed(0)
    model = compile_whole(compile_fsdp.fully_shard(_LossAndLogits(4, 4)), inner_backend="aot_eager", verify=True)
    model(torch.randn(3, 4))["loss"].backward()
    assert model.weight.grad is not None
    assert len(compile_fsdp.reports()) == 2


@pytest.mark.parametrize(
    ("dtype", "factor", "is_right"),
    [
        (torch.float32, 1 + 1e-6, True),
        (torch.float32, 1.01, False),
        (torch.float64, 1 + 1e-6, False),
        (torch.bfloat16, 1.01, True),
        (torch.bfloat16, 2.0, False),
        (torch.float32, float("nan"), False),
        (torch.float32, float("inf"), False),
    ],
)
def test_tolerance_depends_on_dtype(dtype: torch.dtype, factor: float, is_right: bool) -> None:
    expected = torch.arange(1.0, 9.0).to(dtype)
    for size in (1.0, 1e6):
        problem = difference(expected * size * factor, expected * size, tolerance_of([dtype, torch.int64]))
        assert (problem == "") == is_right


def test_difference_allows_rounding_but_not_other_values_or_shapes() -> None:
    assert difference(torch.tensor([1e-9]), torch.tensor([0.0]), tolerance_of([torch.float32])) == ""
    assert difference(torch.tensor([1e-3]), torch.tensor([0.0]), tolerance_of([torch.float32])) != ""
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0) == "has different values"
    assert "shape" in difference(torch.zeros(2), torch.zeros(3), 1.0)
