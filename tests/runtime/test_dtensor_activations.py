"""Sharded modules whose inputs and outputs are DTensors train as with eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import compile_fsdp
from compile_fsdp.errors import UnsupportedFeatureError
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.check import full
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type, run_ranks
from helpers.releases.skip import skip_before


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([_Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _sequence_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Activations between the blocks are DTensors, sharded over the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )


def _take_steps(
    model: Any, fully_shard: Any, options: Any, backward: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    """Train for three steps by `backward`, which returns the loss; return the losses and the parameters."""
    if fully_shard is compile_fsdp.fully_shard:
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        losses.append(backward(step).detach())
        optimizer.step()
        optimizer.zero_grad()
    return [full(each) for each in losses] + [parameter.full_tensor().detach() for parameter in model.parameters()]


def _train(fully_shard: Any, options: Any) -> list[torch.Tensor]:
    mesh = shared_mesh(device_type(), (2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model: Any = _Model()
    _sequence_parallel(model, mesh["tp"])
    shard_blocks(model, fully_shard, mesh=mesh["dp"])

    def backward(step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        tokens, targets = torch.randint(12, (2, 6)), torch.randint(12, (2, 6))
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss

    return _take_steps(model, fully_shard, options, backward)


def _train_on_full_mesh(fully_shard: Any, options: Any) -> list[torch.Tensor]:
    """Train with parameters and activations as DTensors over all mesh dims, data parallel included."""
    from torch.distributed.fsdp import DataParallelMeshDims

    device = device_type()
    mesh = shared_mesh(device, (2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(_Block())

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            is_rows = name.endswith("down") and key == "weight"
            place = Shard(0) if name.endswith("up") else Shard(1) if is_rows else Replicate()
            value = distribute_tensor(parameter.detach(), mesh, [Replicate(), place])
            module.register_parameter(key, nn.Parameter(value))

    distribute_module(model, mesh, distribute)
    shard_blocks(model, fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    def backward(step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        x = DTensor.from_local(torch.randn(3, 8), mesh, [Shard(0), Replicate()], run_check=False)
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return _take_steps(model, fully_shard, options, backward)


_MODELS = {"sequence parallel": _train, "full mesh": _train_on_full_mesh}


def _as_eager(rank: int, name: str, inner_backend: str) -> list[float]:
    eager = _MODELS[name](torch_fully_shard, None)
    ours = _MODELS[name](compile_fsdp.fully_shard, {"inner_backend": inner_backend})
    return [(one - other).abs().max().item() for one, other in zip(ours, eager, strict=True)]


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _MODELS)
def test_models_with_dtensor_activations_match_eager(name: str, inner_backend: str) -> None:
    if name != "sequence parallel":
        skip_before("2.12")
    for differences in run_ranks(4, _as_eager, name, inner_backend):
        assert max(differences) <= (0 if inner_backend == "aot_eager" else 1e-5)


def _hooked(rank: int) -> None:
    mesh = shared_mesh(device_type(), (2, 2), ("dp", "tp"))
    model: Any = _Model()
    _sequence_parallel(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"])

    def double(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * 2)

    model.layers[0].register_forward_hook(double)
    compile_whole(model, inner_backend="aot_eager")
    with pytest.raises(UnsupportedFeatureError, match="expected hooks on plain tensors, got one on a DTensor"):
        model(torch.zeros(2, 6, dtype=torch.long))


def test_gradient_hook_on_a_dtensor_raises() -> None:
    run_ranks(4, _hooked)
