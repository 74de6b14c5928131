"""Offloaded tensors come back unchanged, however late the copies are."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp import ops
from compile_fsdp.torch_compat.distributed import functional_collectives
from helpers.ranks.pools import device_type, run_ranks

SIZE = (64, 32)


def _back(rank: int) -> list[bool]:
    """Overwrite each of three tensors as early as a graph may: after the next offload, or the last offload."""
    device = torch.device(device_type())
    if device.type == "emulated":
        from helpers.device.install import install

        install().set_delays(rank, 20_000.0)
    tensors = [torch.full(SIZE, float(i), device=device).t() for i in range(3)]
    away: list[torch.Tensor] = []
    for i, tensor in enumerate(tensors):
        away.append(ops.offload(tensor, tensors[i - 1 : i], i == 2))
        for earlier in tensors[i - 1 : i]:
            earlier.fill_(-1.0)
    tensors[2].fill_(-1.0)
    back = [functional_collectives.wait_tensor(ops.fetch(each, device)) for each in reversed(away)]
    found = [bool((each == float(2 - i)).all()) for i, each in enumerate(back)]
    assert all(each.device.type == "cpu" and each.stride() == (1, SIZE[1]) for each in away)
    assert all(each.device.type == device.type and each.stride() == (1, SIZE[1]) for each in back)
    return found


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_offloaded_tensor_comes_back_unchanged(device: str) -> None:
    assert run_ranks(1, _back, device=device) == [[True] * 3]


def _races(rank: int) -> None:
    device = torch.device(device_type())
    tensor = torch.ones(SIZE, device=device)
    ops.offload(tensor, [], False)
    with pytest.raises(RuntimeError, match=r"^race"):
        tensor.fill_(-1.0)  # without the wait of the next offload


def test_write_during_an_offload_is_a_race() -> None:
    run_ranks(1, _races, device="emulated")
    # The copy is over before a later function of this rank gets the memory.
    assert run_ranks(1, _back, device="emulated") == [[True] * 3]


def test_fake_results_have_the_right_devices_and_strides() -> None:
    with torch._subclasses.FakeTensorMode():
        there = torch.empty_strided(SIZE, (1, SIZE[0]), device="meta")
        away = ops.offload(there, [], True)
        back = ops.fetch(away, torch.device("meta"))
    assert (away.device.type, back.device.type) == ("cpu", "meta")
    assert away.stride() == back.stride() == there.stride()
