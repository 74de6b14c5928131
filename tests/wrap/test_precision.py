"""Full-precision modules: compute dtype, output dtype and compiled parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.wrap import ModuleWrapPolicy, auto_shard, plan
from helpers.parity.check import Parity, compare, compare_grads
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
LOW = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


class Probe(nn.Module):
    """Module that records the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> Any:
        self.dtypes += [each.dtype for each in (x, *others.values())]
        return {"out": x * self.weight, "count": torch.tensor(len(self.dtypes)), "text": "as it is"}


class Recursive(nn.Module):
    """Module that calls itself in low and high precision in turn. It has no parameters for FSDP2 to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        self.dtypes.append(x.dtype)
        if depth > 0:
            inside = self(x.bfloat16() if depth % 2 else x, depth - 1)
            self.dtypes.append(inside.dtype)
        return x


class Calls(nn.Module):
    """Root module that applies `call` to its submodule."""

    def __init__(self, part: nn.Module, call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.part, self.call = part, call
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.part, self.first(x))


def _probe(call: Callable[[Any, torch.Tensor], Any], part: Any, *classes: type[nn.Module]) -> Any:
    """Return the result of `call` inside a bfloat16 model."""
    model = Calls(part, call)
    auto_shard(model, ModuleWrapPolicy({nn.Linear}), mixed_precision_overrides=classes, mp_policy=LOW)
    return model(torch.ones(2, 4))


@pytest.mark.usefixtures("one_rank")
class TestDtypes:
    def test_floating_inputs_are_upcast_and_outputs_cast_back(self) -> None:
        probe = Probe()
        output = _probe(lambda part, x: part(x, low=x, high=x.float(), index=x.long()), probe, Probe)
        assert probe.dtypes == [FP32, FP32, FP32, torch.int64]
        assert (output["out"].dtype, output["count"].dtype, output["text"]) == (BF16, torch.int64, "as it is")

    def test_modules_without_override_stay_in_low_precision(self) -> None:
        probe = Probe()
        assert _probe(lambda part, x: part(x), probe, nn.LayerNorm)["out"].dtype is BF16
        assert probe.dtypes == [BF16]

    def test_first_floating_input_of_each_call_sets_the_output_dtype(self) -> None:
        def call(part: Any, x: torch.Tensor) -> list[torch.dtype]:
            inputs = [x, x.float(), x.double(), x]
            return [part(each)["out"].dtype for each in inputs]

        probe = Probe()
        assert _probe(call, probe, Probe) == [BF16, FP32, torch.float64, BF16]
        assert probe.dtypes == [FP32, FP32, torch.float64, FP32]  # never downcast

    def test_nested_overridden_modules_cast_independently(self) -> None:
        """The outer module's input is low precision; the inner module's is high precision."""
        inner = Probe()

        class Outer(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                inside = inner(super().forward(x))["out"]
                assert inside.dtype is FP32
                return inside

        outer = Outer(4, 4)
        outer.inner = inner
        assert _probe(lambda part, x: part(x), outer, Outer, Probe).dtype is BF16
        assert inner.dtypes == [FP32]

    def test_recursive_calls_return_the_dtype_of_their_input(self) -> None:
        module = Recursive()
        assert _probe(lambda part, x: part(x, depth=3), module, Recursive).dtype is BF16
        # Each depth computes in high precision; each call returns its input's dtype.
        assert module.dtypes == [FP32, FP32, FP32, FP32, BF16, FP32, BF16]

    def test_output_stays_in_full_precision_without_a_floating_input(self) -> None:
        assert _probe(lambda part, x: part(torch.arange(3)), nn.Embedding(8, 4), nn.Embedding).dtype is FP32

    def test_modules_without_parameters_run_in_full_precision(self) -> None:
        softmax = nn.Softmax(-1)
        inputs = []

        def call(part: Any, x: torch.Tensor) -> torch.Tensor:
            inputs.append(x)
            return part(x)

        output = _probe(call, softmax, nn.Softmax)
        assert type(softmax).__name__ == "Softmax" and isinstance(softmax, nn.Softmax)
        assert output.dtype is BF16
        assert torch.equal(output, torch.softmax(inputs[0].float(), -1).bfloat16())


def test_plan_gives_overridden_modules_full_precision_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with fake_world(2):
        planned = plan(
            model,
            ModuleWrapPolicy({nn.Sequential, nn.Linear}),
            mixed_precision_overrides=(nn.BatchNorm1d, nn.Sequential),
            ignored_modules=[model[1]],
            mp_policy=LOW,
            reshard_after_forward=False,
        )
    found = {group.fqns[0]: group.kwargs for group in planned.groups}
    full = MixedPrecisionPolicy()
    assert {fqn: kwargs["mp_policy"] for fqn, kwargs in found.items()} == {
        "0": full,  # inside the root, which is an overridden Sequential
        "2.0": full,
        "2.1": full,
        "2": full,
        "": full,
    }
    assert all(kwargs["reshard_after_forward"] is False for kwargs in found.values())


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that casts by hand as the override does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), norm(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The norm is used twice, the second time with an input in float32.
        h = self.norm(self.up(x))
        return x + self.down(torch.tanh(h + self.norm(h.float()).to(h.dtype)))


def _model(norm: Callable[[int], nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(norm), Block(norm), norm(6))


def _as_by_hand(rank: int) -> list[Parity]:
    """Compare overridden norms, eager and compiled, with casts and groups by hand."""
    mesh = init_device_mesh("cpu", (2,))
    by_hand = _model(BatchNorm)
    for block in by_hand[:2]:
        torch_fully_shard(block.norm, mesh=mesh)
        torch_fully_shard(block, mesh=mesh, mp_policy=LOW)
    torch_fully_shard(by_hand[2], mesh=mesh)
    torch_fully_shard(by_hand, mesh=mesh, mp_policy=LOW)
    models = [by_hand]
    for _ in range(2):
        model = _model(nn.BatchNorm1d)
        models.append(auto_shard(model, mesh=mesh, mp_policy=LOW, mixed_precision_overrides=(nn.BatchNorm1d,)))
    models[2].compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    results = [Parity(), Parity()]
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        x, target = torch.randn(5, 6), torch.randn(5, 6)
        losses = []
        for model in models:
            output = model(x)
            assert output.dtype is BF16
            losses.append((output.float() - target).square().mean())
            losses[-1].backward()
        for result, model, loss in zip(results, models[1:], losses[1:], strict=True):
            compare(result, f"step {step}: loss", loss.detach(), losses[0].detach())
            compare_grads(result, f"step {step}", model, by_hand)
            for (name, mine), theirs in zip(model.named_buffers(), by_hand.buffers(), strict=True):
                compare(result, f"step {step}: {name}", mine, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [report.direction for report in compile_fsdp.reports()] == ["forward", "backward"]
    return results


def test_overridden_norms_train_like_casts_by_hand() -> None:
    for results in run_ranks(2, _as_by_hand):
        assert [result.differing for result in results] == [[], []]
