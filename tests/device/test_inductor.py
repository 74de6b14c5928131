"""Inductor's kernels on the emulated device: values, asynchrony and races."""

from __future__ import annotations

import pytest
import torch

from helpers.device.install import delayed, install
from helpers.ranks.pools import run_ranks

DEVICE = "emulated"


def _fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).softmax(-1) * 2


def _computes(rank: int) -> float:
    torch.manual_seed(0)
    inputs = torch.randn(16, 32, device="cpu"), torch.randn(32, 32, device="cpu", requires_grad=True)
    here = [tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected, got = (torch.compile(_fused)(*each) for each in (inputs, here))
    expected.square().sum().backward()
    got.square().sum().backward()
    assert got.device.type == DEVICE
    assert torch.equal(got.cpu(), expected)
    assert inputs[1].grad is not None and here[1].grad is not None
    return (here[1].grad.cpu() - inputs[1].grad).abs().max().item()


def test_kernels_return_the_values_of_the_cpu() -> None:
    assert run_ranks(1, _computes, device=DEVICE) == [0.0]


def _is_asynchronous(rank: int) -> tuple[bool, float]:
    function = torch.compile(lambda x: (x.sin() + 1) * 2)
    x = torch.ones(8)
    function(x)
    torch.emulated.synchronize()
    with delayed(0, 200_000.0):
        result = function(x)
        event = torch.emulated.current_stream().record_event()
        was_running = not event.query()
    return was_running, result.sum().item()


def test_kernel_launch_does_not_block_the_host() -> None:
    ((was_running, total),) = run_ranks(1, _is_asynchronous, device=DEVICE)
    assert was_running
    assert total == pytest.approx(8 * 2 * (torch.ones(()).sin().item() + 1))


def _races(rank: int) -> list[str]:
    function = torch.compile(lambda x: (x.sin() + 1) * 2)
    x = torch.ones(8)
    install().name_storage(x, "the input")
    function(x)
    other = torch.emulated.Stream()
    errors = []
    for waits in (True, False):
        x.add_(1)
        if waits:
            other.wait_stream(torch.emulated.current_stream())
        try:
            with torch.emulated.stream(other):
                function(x)
        except RuntimeError as error:
            errors.append(str(error).partition("\n")[0])
        torch.emulated.synchronize()
    return errors


def test_kernel_that_does_not_wait_for_its_input_is_a_race() -> None:
    ((error,),) = run_ranks(1, _races, device=DEVICE)
    assert error.startswith("race on the input: cpp_fused_")
    assert "reads what aten::add" in error
