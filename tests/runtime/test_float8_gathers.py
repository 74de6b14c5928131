"""torchao's float8 all-gather, whose unsharded weights are tensor subclasses, trains as with eager FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import compile_fsdp
from compile_fsdp.errors import UnsupportedFeatureError
from helpers.models.blockwise import shard_blocks
from helpers.models.stacks import Block
from helpers.parity.check import more_collectives
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import Collective, collectives_of
from helpers.ranks.tests import on_ranks

pytest.importorskip("torchao", reason="torchao comes with the extra for the examples")

_WIDTH = 16


def _build(fully_shard: Any, way: str) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    torch.manual_seed(0)
    blocks = 1 if way == "tensor_parallel" else 2
    model: Any = nn.Sequential(*(Block(_WIDTH, breaks=way == "cut") for _ in range(blocks)))
    # emulate=True is for machines without float8 hardware.
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True))
    mesh = shared_mesh("cpu", (2, 2), ("dp", "tp")) if way == "tensor_parallel" else shared_mesh("cpu", (2,), ("dp",))
    if way == "tensor_parallel":
        for each in model:
            parallelize_module(each, mesh["tp"], {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})
    return shard_blocks(model, fully_shard, mesh=mesh["dp"], reshard_after_forward=False if way == "kept" else None)


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
    eager, ours = _build(torch_fully_shard, way), _build(compile_fsdp.fully_shard, way)
    options = {"inner_backend": inner_backend, "verify": True}
    ours.compile(backend="compile_fsdp", fullgraph=way != "cut", options=options)
    batch = rank // 2 if way == "tensor_parallel" else rank
    pairs = zip(_losses_and_gradients(ours, batch, eager_step), _losses_and_gradients(eager, batch), strict=True)
    worst = max((one - other).abs().max().item() for one, other in pairs)
    return worst, _last_collectives(ours), _last_collectives(eager)


# parity/test_parity_table.py trains frozen and checkpointed layers with subclasses that are unsharded weights.
@pytest.mark.parametrize(
    ("way", "inner_backend", "eager_step"),
    [
        ("cut", "aot_eager", None),
        ("tensor_parallel", "aot_eager", None),
        ("kept", "aot_eager", 2),
        *(
            pytest.param(way, "inductor", None, marks=pytest.mark.slow)
            for way in ("plain", "kept", "cut", "tensor_parallel")
        ),
    ],
)
def test_float8_gathers_match_eager(way: str, inner_backend: str, eager_step: int | None) -> None:
    ranks = 4 if way == "tensor_parallel" else 2
    for worst, ours, eager in run_ranks(ranks, _differences, way, inner_backend, eager_step):
        assert worst <= (0 if inner_backend == "aot_eager" else 1e-5)
        assert more_collectives(ours, eager) == []


@on_ranks(2)
def test_precomputed_scales_raise_and_name_the_parameter(rank: int) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model = _build(compile_fsdp.fully_shard, "plain")
    model.compile(backend="compile_fsdp", options={"inner_backend": "aot_eager"})
    precompute_float8_dynamic_scale_for_fsdp(model)
    x = torch.ones(6, _WIDTH)
    refusal = r"(?s)^0\.up\.weight cannot be compiled with .*_precomputed_scale"
    with pytest.raises(UnsupportedFeatureError, match=refusal):
        model(x)
    model.reset_iter_state()
    for module in model.modules():
        if hasattr(module, "weight") and hasattr(module.weight, "_local_tensor"):
            module.weight._local_tensor._precomputed_scale = None
    assert model(x).square().mean().item() > 0
