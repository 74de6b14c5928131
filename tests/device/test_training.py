"""Training on the emulated device with delayed streams, compared with the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

import compile_fsdp
from helpers.device.install import delayed
from helpers.models.blockwise import compile_whole
from helpers.models.reference import CASES
from helpers.parity.check import build, full, loss_of
from helpers.ranks.pools import device_type, run_ranks
from helpers.ranks.tests import on_ranks

STEPS = 4


def _train(rank: int, is_compiled: bool, seed: int) -> tuple[list[float], list[list[float]]]:
    with torch.device("cpu"):
        torch.manual_seed(0)
        weights = CASES["mlp"]().model.state_dict()
    case = build("mlp", compile_fsdp.fully_shard if is_compiled else torch_fully_shard)
    for name, parameter in case.model.state_dict().items():
        full_value = weights[name].to(device_type())
        parameter.detach().copy_(distribute_tensor(full_value, parameter.device_mesh))
    if is_compiled:
        case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.01)
    losses = []
    with delayed(seed + rank, 300.0) if device_type() == "emulated" else nullcontext():
        for step in range(STEPS):
            with torch.device("cpu"):
                torch.manual_seed(100 * step + rank)
                batch = {name: value.to(device_type()) for name, value in case.batch().items()}
            loss = loss_of(case.model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        parameters = [full(each.detach()).flatten().tolist() for each in case.model.parameters()]
        return [each.item() for each in losses], parameters


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_training_with_delayed_streams_equals_the_cpu_bit_by_bit(is_compiled: bool) -> None:
    expected = run_ranks(2, _train, is_compiled, 0, device="cpu")
    for seed in (1, 2):
        assert run_ranks(2, _train, is_compiled, seed, device="emulated") == expected


class _Batch(dict[str, torch.Tensor]):
    pass


class _ReadsBatch(nn.Linear):
    def forward(self, batch: _Batch, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(batch["x"])
        return super().forward(batch["x"])


@on_ranks(1, "emulated")
def test_inputs_in_a_subclass_of_dict_are_moved_to_the_device(rank: int) -> None:
    model, kept = _ReadsBatch(4, 4), list[torch.Tensor]()
    compile_whole(compile_fsdp.fully_shard(model), inner_backend="aot_eager")
    model(_Batch(x=torch.ones(2, 4, device="cpu")), kept).sum().backward()
    assert [each.device.type for each in kept] == ["emulated"]


@on_ranks(1, "emulated")
def test_forward_waits_for_an_optimizer_on_another_stream(rank: int) -> None:
    model: Any = compile_fsdp.fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=True)
    compile_whole(model, inner_backend="aot_eager")
    weight, x = model.weight.to_local(), torch.ones(1, 4)
    side = torch.emulated.Stream()
    for step in range(3):
        side.wait_stream(torch.emulated.current_stream())
        with delayed(step, 20000.0), torch.emulated.stream(side), torch.no_grad():
            weight.fill_(step)
            model.set_post_optim_event(side.record_event())
        assert model(x).tolist() == [[4.0 * step] * 4]
