"""torchao's float8 all-gather, whose unsharded weights are tensor subclasses, trains as with eager FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import compile_fsdp
from compile_fsdp.errors import UnsupportedFeatureError
from helpers.parity.check import more_collectives
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import Collective, collectives_of

pytest.importorskip("torchao", reason="torchao comes with the extra for the examples")

_WIDTH = 16


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _CutBlock(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return self.down(x)  # type: ignore[no-any-return]


def _shard(
    fully_shard: Any, mesh: Any, block: type[_Block] = _Block, prepare: Any = lambda model: None, **arguments: Any
) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model: Any = nn.Sequential(block(), block())
    # emulate=True is for machines without float8 hardware.
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True))
    prepare(model)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **arguments)
    return model


def _plain(fully_shard: Any) -> Any:
    return _shard(fully_shard, init_device_mesh("cpu", (2,)))


def _kept(fully_shard: Any) -> Any:
    return _shard(fully_shard, init_device_mesh("cpu", (2,)), reshard_after_forward=False)


def _cut(fully_shard: Any) -> Any:
    return _shard(fully_shard, init_device_mesh("cpu", (2,)), _CutBlock)


def _frozen(fully_shard: Any) -> Any:
    return _shard(
        fully_shard, init_device_mesh("cpu", (2,)), prepare=lambda model: model[0].up.weight.requires_grad_(False)
    )


def _checkpointed(fully_shard: Any) -> Any:
    def wrap(model: Any) -> None:
        model[0], model[1] = checkpoint_wrapper(model[0]), checkpoint_wrapper(model[1])

    return _shard(fully_shard, init_device_mesh("cpu", (2,)), prepare=wrap)


def _tensor_parallel(fully_shard: Any) -> Any:
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def parallelize(model: Any) -> None:
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})

    return _shard(fully_shard, mesh["dp"], prepare=parallelize)


_WAYS = {each.__name__.strip("_"): each for each in (_plain, _kept, _cut, _frozen, _checkpointed, _tensor_parallel)}


def _losses_and_gradients(model: Any, batch: int, eager_step: int | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(batch)
    found: list[torch.Tensor] = []
    for step in range(4):
        x = torch.randn(6, _WIDTH, generator=generator)
        compiled = model._compiled_call_impl
        if step == eager_step:
            model._compiled_call_impl = None
        loss = model(x).square().mean()
        model._compiled_call_impl = compiled
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found += [loss.detach(), *(gradient.to_local() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _last_collectives(model: Any) -> list[Collective]:
    return collectives_of(lambda: model(torch.ones(6, _WIDTH)).square().mean().backward())


def _differences(
    rank: int, way: str, inner_backend: str, eager_step: int | None
) -> tuple[float, list[Collective], list[Collective]]:
    eager, ours = _WAYS[way](torch_fully_shard), _WAYS[way](compile_fsdp.fully_shard)
    options = {"inner_backend": inner_backend, "verify": True}
    ours.compile(backend="compile_fsdp", fullgraph=way != "cut", options=options)
    batch = rank // 2 if way == "tensor_parallel" else rank
    pairs = zip(_losses_and_gradients(ours, batch, eager_step), _losses_and_gradients(eager, batch), strict=True)
    worst = max((one - other).abs().max().item() for one, other in pairs)
    return worst, _last_collectives(ours), _last_collectives(eager)


def _check(way: str, inner_backend: str, tolerance: float, eager_step: int | None = None) -> None:
    ranks = 4 if way == "tensor_parallel" else 2
    for worst, ours, eager in run_ranks(ranks, _differences, way, inner_backend, eager_step):
        assert worst <= tolerance
        assert more_collectives(ours, eager) == []


# The parity table covers the slow variants, except "kept", which the next test covers.
_QUICK = ("cut", "tensor_parallel")


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in _QUICK else pytest.mark.slow) for way in _WAYS])
def test_aot_eager_is_bitwise_equal_to_eager(way: str) -> None:
    _check(way, "aot_eager", tolerance=0)


@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.slow), "kept"])
def test_eager_step_between_compiled_steps_is_bitwise_equal(way: str) -> None:
    _check(way, "aot_eager", tolerance=0, eager_step=2)


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_inductor_is_equal_to_eager_within_1e_5(way: str) -> None:
    _check(way, "inductor", tolerance=1e-5)


def _precompute(rank: int) -> tuple[str, float]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model = _plain(compile_fsdp.fully_shard)
    model.compile(backend="compile_fsdp", options={"inner_backend": "aot_eager"})
    precompute_float8_dynamic_scale_for_fsdp(model)
    x = torch.ones(6, _WIDTH)
    with pytest.raises(UnsupportedFeatureError) as refused:
        model(x)
    model.reset_iter_state()
    for module in model.modules():
        if hasattr(module, "weight") and hasattr(module.weight, "_local_tensor"):
            module.weight._local_tensor._precomputed_scale = None
    return str(refused.value), model(x).square().mean().item()


def test_precomputed_scales_raise_and_name_the_parameter() -> None:
    for message, loss in run_ranks(2, _precompute):
        assert message.startswith("0.up.weight cannot be compiled with ")
        assert "_precomputed_scale" in message
        assert loss > 0
