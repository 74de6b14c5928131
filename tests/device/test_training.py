"""Training on the emulated device with delayed streams, compared with the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

import compile_fsdp
from helpers.device.install import delayed
from helpers.models.reference import CASES
from helpers.parity.check import build, full, loss_of
from helpers.ranks.pools import device_type, run_ranks

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
