"""Sharded modules whose inputs and outputs are DTensors train as with eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from compile_fsdp.torch_compat.fsdp import FSDPMeshInfo
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
        self.layers = nn.ModuleList([_Block() for _ in range(2)])
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
            "embedding": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
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


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _take_steps(
    model: Any, fully_shard: Any, options: Any, backward: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    """Train for three steps and return the losses; compile first if compile_fsdp sharded the model.

    Args:
        model: The model.
        fully_shard: The function that sharded the model.
        options: Options of the compile_fsdp backend.
        backward: Runs the forward and the backward of a step, and returns its loss.
    """
    if fully_shard is compile_fsdp.fully_shard:
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        losses.append(backward(step).detach())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]


def _train(fully_shard: Any, options: Any) -> list[torch.Tensor]:
    mesh = shared_mesh(device_type(), (2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model: Any = _Model()
    _sequence_parallel(model, mesh["tp"])
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])

    def backward(step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        tokens, targets = torch.randint(12, (2, 6)), torch.randint(12, (2, 6))
        with loss_parallel():
            loss = _loss(model(tokens), targets)
            loss.backward()
        return loss

    losses = _take_steps(model, fully_shard, options, backward)
    return losses + [parameter.full_tensor().detach() for parameter in model.parameters()]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return torch.bmm(x.unsqueeze(0).expand(local.shape[0], -1, -1), local).sum(0)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.out = nn.Linear(8, 8), _Experts(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.experts(self.router(x))))


def _train_experts(fully_shard: Any, options: Any) -> list[torch.Tensor]:
    """Train with experts sharded over a 2x2 mesh (efsdp, ep) and other parameters over all four ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    device = device_type()
    experts = shared_mesh(device, (2, 2), ("efsdp", "ep"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(_Mixture(), _Mixture())
    info = FSDPMeshInfo(experts["efsdp"], shard_mesh_dim=0)
    for block in model:
        weight = block.experts.weight
        block.experts.weight = nn.Parameter(distribute_tensor(weight.detach(), experts["ep"], [Shard(0)]))
    owned = {block.experts.weight for block in model}

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(1), info) if parameter in owned else None

    for module in (*model, model):
        fully_shard(module, mesh=shared_mesh(device, (4,), ("dp",)), shard_placement_fn=place)

    def backward(step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + dist.get_rank())
        loss: torch.Tensor = model(torch.randn(3, 8)).square().mean()
        loss.backward()
        return loss

    losses = _take_steps(model, fully_shard, options, backward)
    return losses + [parameter.to_local().detach() for parameter in model.parameters()]



def _train_on_full_mesh(fully_shard: Any, options: Any) -> list[torch.Tensor]:
    """Train with parameters and activations as DTensors over all mesh dims, data parallel included."""
    from torch.distributed.fsdp import DataParallelMeshDims

    device = device_type()
    mesh = shared_mesh(device, (2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(_Block(), _Block())

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            is_rows = name.endswith("down") and key == "weight"
            place = Shard(0) if name.endswith("up") else Shard(1) if is_rows else Replicate()
            value = distribute_tensor(parameter.detach(), mesh, [Replicate(), place])
            module.register_parameter(key, nn.Parameter(value))

    distribute_module(model, mesh, distribute)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    def backward(step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        x = DTensor.from_local(torch.randn(3, 8), mesh, [Shard(0), Replicate()], run_check=False)
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    losses = _take_steps(model, fully_shard, options, backward)
    return losses + [parameter.full_tensor().detach() for parameter in model.parameters()]


_MODELS = {"sequence parallel": _train, "experts": _train_experts, "full mesh": _train_on_full_mesh}


def _as_eager(rank: int, name: str, inner_backend: str) -> list[float]:
    eager = _MODELS[name](torch_fully_shard, None)
    ours = _MODELS[name](compile_fsdp.fully_shard, {"inner_backend": inner_backend})
    return [(one - other).abs().max().item() for one, other in zip(ours, eager, strict=True)]


@pytest.mark.parametrize("name", _MODELS)
def test_aot_eager_is_bitwise_equal_to_eager(name: str) -> None:
    if name != "sequence parallel":
        skip_before("2.12")
    for differences in run_ranks(4, _as_eager, name, "aot_eager"):
        assert max(differences) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_inductor_is_equal_to_eager_within_1e_5(name: str) -> None:
    if name != "sequence parallel":
        skip_before("2.12")
    for differences in run_ranks(4, _as_eager, name, "inductor"):
        assert max(differences) < 1e-5


def _hooked(rank: int) -> str:
    mesh = shared_mesh(device_type(), (2, 2), ("dp", "tp"))
    model: Any = _Model()
    _sequence_parallel(model, mesh["tp"])
    for module in (*model.layers, model):
        compile_fsdp.fully_shard(module, mesh=mesh["dp"])

    def double(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * 2)

    model.layers[0].register_forward_hook(double)
    model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    try:
        model(torch.zeros(2, 6, dtype=torch.long))
    except UnsupportedFeatureError as error:
        return str(error)
    return ""


def test_gradient_hook_on_a_dtensor_raises() -> None:
    for message in run_ranks(4, _hooked):
        assert "expected hooks on plain tensors, got one on a DTensor" in message
