"""Streams, events, asynchronous copies, errors and the autograd thread of the emulated device."""

from __future__ import annotations

import threading

import pytest
import torch

from helpers.device.install import delayed, held
from helpers.ranks.tests import on_ranks


@on_ranks(1, "emulated")
def test_kernel_launch_does_not_block_the_host(rank: int) -> None:
    module = torch.emulated
    x = torch.ones(4)
    module.synchronize()
    with held():
        y = x + 1
        event = module.current_stream().record_event()
        assert not event.query()
    event.synchronize()
    assert event.query()
    assert y.sum().item() == 8


@on_ranks(1, "emulated")
def test_synchronized_streams_compute_the_sequential_result(rank: int) -> None:
    module = torch.emulated
    expected = 0.0
    with delayed(7, 2000.0):
        side = module.Stream()
        total = torch.zeros(1)
        for step in range(20):
            side.wait_stream(module.current_stream())
            with module.stream(side):
                total.mul_(2)
            module.current_stream().wait_event(side.record_event())
            total.add_(step)
            expected = 2 * expected + step
        assert total.tolist() == [expected]


@on_ranks(1, "emulated")
def test_events_measure_elapsed_time(rank: int) -> None:
    module = torch.emulated
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    with delayed(1, 4000.0):
        first.record()
        x = torch.ones(4)
        for _ in range(10):
            x.add_(1)
        last.record()
        last.synchronize()
        assert 1 < first.elapsed_time(last) < 1000


@on_ranks(1, "emulated")
def test_copies_to_pinned_memory_are_async_and_from_pageable_memory_immediate(rank: int) -> None:
    module = torch.emulated
    pinned = torch.zeros(4, device="cpu", pin_memory=True)
    plain = torch.arange(4.0, device="cpu")
    x = torch.ones(4)
    with held():
        x.add_(1)
        pinned.copy_(x, non_blocking=True)
        assert bool((pinned == 0).all())
        up = plain.to("emulated", non_blocking=True)
        plain.fill_(-1)  # after the copy has read it
    module.synchronize()
    assert pinned.is_pinned() and pinned.tolist() == [2] * 4
    assert up.tolist() == [0, 1, 2, 3]


@on_ranks(1, "emulated")
def test_kernel_error_is_raised_at_synchronize(rank: int) -> None:
    table = torch.ones(3, 2)
    rows = torch.full((1,), 5, dtype=torch.int64)
    torch.index_select(table, 0, rows)  # fails when the kernel runs
    with pytest.raises(RuntimeError, match=r"(?s)failed earlier, on the device: aten::index_select.*out of range"):
        torch.emulated.synchronize()
    torch.emulated.synchronize()  # the error is raised only once


class _Thread(torch.autograd.Function):
    names: list[str] = []  # noqa: RUF012  # filled by the backward, on autograd's thread

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        _Thread.names.append(str(threading.get_ident()))
        _Thread.names.append(str(torch.emulated.current_stream().stream_id))
        return grad


@on_ranks(1, "emulated")
def test_backward_runs_on_the_autograd_thread_and_on_the_forward_stream(rank: int) -> None:
    side = torch.emulated.Stream()
    x = torch.ones(2, requires_grad=True)
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        y = _Thread.apply(x).sum()
    y.backward()
    torch.emulated.current_stream().wait_stream(side)
    thread, stream = _Thread.names
    assert thread != str(threading.get_ident())
    assert stream == str(side.stream_id)
    assert x.grad.tolist() == [1.0, 1.0]
