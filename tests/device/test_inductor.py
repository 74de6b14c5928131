"""Inductor's kernels on the emulated device: values, asynchrony and races."""

from __future__ import annotations

import pytest
import torch

from helpers.device.install import delayed, install
from helpers.ranks.tests import on_ranks

DEVICE = "emulated"


def _fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).softmax(-1) * 2


@on_ranks(1, DEVICE)
def test_kernels_return_the_values_of_the_cpu(rank: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 32, device="cpu"), torch.randn(32, 32, device="cpu", requires_grad=True)
    here = [tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected, got = (torch.compile(_fused)(*each) for each in (inputs, here))
    expected.square().sum().backward()
    got.square().sum().backward()
    assert got.device.type == DEVICE
    assert torch.equal(got.cpu(), expected)
    assert inputs[1].grad is not None and here[1].grad is not None
    assert torch.equal(here[1].grad.cpu(), inputs[1].grad)


@on_ranks(1, DEVICE)
def test_kernel_launch_does_not_block_the_host(rank: int) -> None:
    function = torch.compile(lambda x: (x.sin() + 1) * 2)
    x = torch.ones(8)
    function(x)
    torch.emulated.synchronize()
    with delayed(0, 200_000.0):
        result = function(x)
        event = torch.emulated.current_stream().record_event()
        assert not event.query()
    assert result.sum().item() == pytest.approx(8 * 2 * (torch.ones(()).sin().item() + 1))


@on_ranks(1, DEVICE)
def test_kernel_that_does_not_wait_for_its_input_is_a_race(rank: int) -> None:
    function = torch.compile(lambda x: (x.sin() + 1) * 2)
    x = torch.ones(8)
    install().name_storage(x, "the input")
    function(x)
    other = torch.emulated.Stream()
    x.add_(1)
    other.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(other):
        function(x)
    torch.emulated.synchronize()
    x.add_(1)
    race = pytest.raises(RuntimeError, match=r"^race on the input: cpp_fused_.*reads what aten::add")
    with race, torch.emulated.stream(other):
        function(x)
    torch.emulated.synchronize()
