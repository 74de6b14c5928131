"""Sharded and compiled pipeline stages train as in eager FSDP2 under torch's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compile_fsdp
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type, run_ranks
from helpers.ranks.tests import on_ranks
from helpers.releases.skip import skip_before

_WIDTH = 8


class _Stage(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[1](torch.tanh(self.layers[0](x)))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _train(fully_shard: Any, mesh: DeviceMesh, schedule_class: Any, reshards: bool) -> list[torch.Tensor]:
    """Train for three steps; return this rank's losses and final parameters."""
    pipeline, data = mesh["pp"], mesh["dp"]
    place, size = pipeline.get_local_rank(), pipeline.size()
    count = 2 if issubclass(schedule_class, schedules.PipelineScheduleMulti) else 1
    numbers = [place + size * i for i in range(count)]
    if schedule_class.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        numbers = [place, 2 * size - 1 - place]
    models: list[Any] = [_Stage(number) for number in numbers]
    for model in models:
        if "tp" in (mesh.mesh_dim_names or ()):
            parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        shard_blocks(model, fully_shard, mesh=data, reshard_after_forward=reshards)
        if fully_shard is compile_fsdp.fully_shard:
            compile_whole(model, **AOT_EAGER)
    stages = [
        PipelineStage(model, number, size * count, torch.device(device_type()), group=pipeline.get_group())
        for model, number in zip(models, numbers, strict=True)
    ]
    schedule = schedule_class(stages if count > 1 else stages[0], n_microbatches=4, loss_fn=_loss)
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
    results: list[torch.Tensor] = []
    for step in range(3):
        torch.manual_seed(100 * step + data.get_local_rank())
        x, target, losses = torch.randn(8, _WIDTH), torch.randn(8, _WIDTH), []
        inputs = [x] if 0 in numbers else []
        if size * count - 1 in numbers:
            schedule.step(*inputs, target=target, losses=losses)
        else:
            schedule.step(*inputs)
        results += [each.detach() for each in losses]
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.full_tensor().detach() for model in models for parameter in model.parameters()]


def _as_eager(rank: int, name: str, reshards: bool, has_tensor_parallelism: bool) -> bool:
    sizes = {"pp": 2, "dp": 2, "tp": 2} if has_tensor_parallelism else {"pp": 2, "dp": 2}
    mesh = shared_mesh(device_type(), tuple(sizes.values()), tuple(sizes))
    eager, ours = (
        _train(shard, mesh, getattr(schedules, name), reshards)
        for shard in (torch_fully_shard, compile_fsdp.fully_shard)
    )
    return len(ours) == len(eager) and all(map(torch.equal, ours, eager))


# (schedule, whether the forward reshards, whether stages are tensor parallel)
QUICK = [
    ("Schedule1F1B", False, False),
    # This schedule computes input gradients and parameter gradients separately.
    ("ScheduleInterleavedZeroBubble", False, False),
]
SLOW = [
    ("Schedule1F1B", True, False),
    ("Schedule1F1B", False, True),
    ("ScheduleGPipe", False, False),
    ("ScheduleInterleaved1F1B", True, False),
    ("ScheduleLoopedBFS", False, False),
    ("ScheduleZBVZeroBubble", False, False),
    ("ScheduleDualPipeV", False, False),
]


@pytest.mark.parametrize(
    ("name", "reshards", "has_tensor_parallelism"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_pipeline_schedules_are_bitwise_equal_to_eager(name: str, reshards: bool, has_tensor_parallelism: bool) -> None:
    if "ZeroBubble" in name or name == "ScheduleDualPipeV":
        skip_before("2.13")  # before, it reads attributes that Python autograd nodes lack
    assert all(run_ranks(8 if has_tensor_parallelism else 4, _as_eager, name, reshards, has_tensor_parallelism))


@on_ranks(1, since="2.13")
def test_split_backward_of_separately_compiled_layers_raises(rank: int) -> None:
    model = shard_blocks(_Stage(0), reshard_after_forward=False)
    for layer in model.layers:
        compile_whole(layer, **AOT_EAGER)
    x = torch.randn(2, _WIDTH, requires_grad=True)
    output = model(x)
    with pytest.raises(RuntimeError) as error:
        stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
    assert "use a different schedule, such as 1F1B" in str(error.value.__cause__)
