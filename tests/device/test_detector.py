"""The emulated device's race detector: races it reports, and ordered accesses it accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers.device.install import install
from helpers.ranks.pools import run_ranks


def _error_of(run: Callable[[], object]) -> str:
    """First line of the error that `run` raises, or ""."""
    try:
        run()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.emulated.synchronize()
    return ""


def _wait_for_event(x: torch.Tensor, side: torch.Stream) -> None:
    event = torch.emulated.Event()
    event.record()
    side.wait_event(event)


def _wait_for_a_third(x: torch.Tensor, side: torch.Stream) -> None:
    third = torch.emulated.Stream()
    third.wait_stream(torch.emulated.current_stream())
    side.wait_stream(third)


def _wait_too_early(x: torch.Tensor, side: torch.Stream) -> None:
    side.wait_stream(torch.emulated.current_stream())
    x.add_(1)


def _wait_for_an_old_event(x: torch.Tensor, side: torch.Stream) -> None:
    event = torch.emulated.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)


# Synchronizations that order, or do not order, a write of `x` on the current stream before a read on the stream `side`.
ORDERED: dict[str, Callable[[torch.Tensor, torch.Stream], object]] = {
    "stream": lambda x, side: side.wait_stream(torch.emulated.current_stream()),
    "event": _wait_for_event,
    "host": lambda x, side: torch.emulated.current_stream().synchronize(),
    "number": lambda x, side: x.sum().item(),
    "third stream": _wait_for_a_third,
}
UNORDERED: dict[str, Callable[[torch.Tensor, torch.Stream], object]] = {
    "nothing": lambda x, side: None,
    "too early": _wait_too_early,
    "old event": _wait_for_an_old_event,
    "event that nobody records": lambda x, side: side.wait_event(torch.emulated.Event()),
}


def _read_elsewhere(rank: int, order: str) -> str:
    x = torch.zeros(8)
    install().name_storage(x, "layers.0.weight")
    x.add_(1)
    side = torch.emulated.Stream()
    {**ORDERED, **UNORDERED}[order](x, side)

    def read() -> None:
        with torch.emulated.stream(side):
            x[2:4].sum()

    return _error_of(read)


@pytest.mark.parametrize("order", ORDERED)
def test_synchronized_read_is_no_race(order: str) -> None:
    assert run_ranks(1, _read_elsewhere, order, device="emulated") == [""]


@pytest.mark.parametrize("order", UNORDERED)
def test_unsynchronized_read_reports_both_operations_streams_and_the_parameter(order: str) -> None:
    (message,) = run_ranks(1, _read_elsewhere, order, device="emulated")
    assert message.startswith("race on layers.0.weight: aten::sum")
    assert "reads what aten::add" in message
    assert "on stream 0 writes, and stream" in message


def _write_elsewhere(rank: int, part: int) -> str:
    x = torch.zeros(8)
    side = torch.emulated.Stream()
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(x[:4])
    return _error_of(lambda: x[part : part + 4].add_(1))


def test_write_races_only_if_it_overlaps_a_read_on_another_stream() -> None:
    (message,) = run_ranks(1, _write_elsewhere, 2, device="emulated")
    assert "aten::add" in message and "writes what aten::sum" in message and "reads" in message
    assert run_ranks(1, _write_elsewhere, 4, device="emulated") == [""]


def _read_on_both(rank: int) -> str:
    x = torch.zeros(8)
    side = torch.emulated.Stream()
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(x)
    torch.sum(x)
    torch.emulated.synchronize()
    return ""


def test_reads_on_two_streams_are_no_race() -> None:
    run_ranks(1, _read_on_both, device="emulated")


def _pinned(rank: int, waits: bool) -> str:
    side = torch.emulated.Stream()
    host = torch.zeros(8, device="cpu", pin_memory=True)
    host.copy_(torch.ones(8), non_blocking=True)
    if waits:
        side.wait_stream(torch.emulated.current_stream())

    def copy() -> None:
        with torch.emulated.stream(side):
            host.to("emulated", non_blocking=True)

    return _error_of(copy)


def test_unsynchronized_copies_of_pinned_memory_are_a_race() -> None:
    assert run_ranks(1, _pinned, True, device="emulated") == [""]
    assert run_ranks(1, _pinned, False, device="emulated")[0].startswith("race on a tensor without a name")


def _frees_early(rank: int, records: bool) -> str:
    side = torch.emulated.Stream()
    tensor = torch.ones(1000)
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(tensor)
    if records:
        tensor.record_stream(side)
    del tensor
    return _error_of(lambda: torch.empty(1000))


def test_reuse_of_memory_that_another_stream_reads_needs_record_stream() -> None:
    assert run_ranks(1, _frees_early, True, device="emulated") == [""]
    (message,) = run_ranks(1, _frees_early, False, device="emulated")
    assert message.startswith("race on ")
    assert "a new allocation on stream 0 writes what aten::sum" in message
