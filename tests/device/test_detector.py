"""The emulated device's race detector: races it reports, and ordered accesses it accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers.device.install import install
from helpers.ranks.tests import on_ranks


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


@pytest.mark.parametrize("order", [*ORDERED, *UNORDERED])
@on_ranks(1, "emulated")
def test_read_without_synchronization_reports_both_operations_streams_and_the_parameter(rank: int, order: str) -> None:
    x = torch.zeros(8)
    install().name_storage(x, "layers.0.weight")
    x.add_(1)
    side = torch.emulated.Stream()
    {**ORDERED, **UNORDERED}[order](x, side)

    def read() -> None:
        with torch.emulated.stream(side):
            x[2:4].sum()

    message = _error_of(read)
    if order in ORDERED:
        assert message == ""
    else:
        assert message.startswith("race on layers.0.weight: aten::sum")
        assert "reads what aten::add" in message
        assert "on stream 0 writes, and stream" in message


@pytest.mark.parametrize("part", [2, 4])
@on_ranks(1, "emulated")
def test_write_races_only_if_it_overlaps_a_read_on_another_stream(rank: int, part: int) -> None:
    x = torch.zeros(8)
    side = torch.emulated.Stream()
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(x[:4])
    message = _error_of(lambda: x[part : part + 4].add_(1))
    parts = ("aten::add", "writes what aten::sum", "reads") if part < 4 else ()
    assert bool(message) is bool(parts) and all(each in message for each in parts)


@on_ranks(1, "emulated")
def test_reads_on_two_streams_are_no_race(rank: int) -> None:
    x = torch.zeros(8)
    side = torch.emulated.Stream()
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(x)
    torch.sum(x)
    torch.emulated.synchronize()


@pytest.mark.parametrize("waits", [False, True])
@on_ranks(1, "emulated")
def test_unsynchronized_copies_of_pinned_memory_are_a_race(rank: int, waits: bool) -> None:
    side = torch.emulated.Stream()
    host = torch.zeros(8, device="cpu", pin_memory=True)
    host.copy_(torch.ones(8), non_blocking=True)
    if waits:
        side.wait_stream(torch.emulated.current_stream())

    def copy() -> None:
        with torch.emulated.stream(side):
            host.to("emulated", non_blocking=True)

    assert _error_of(copy).partition(":")[0] == ("" if waits else "race on a tensor without a name")


@pytest.mark.parametrize("records", [False, True])
@on_ranks(1, "emulated")
def test_reuse_of_memory_that_another_stream_reads_needs_record_stream(rank: int, records: bool) -> None:
    side = torch.emulated.Stream()
    tensor = torch.ones(1000)
    side.wait_stream(torch.emulated.current_stream())
    with torch.emulated.stream(side):
        torch.sum(tensor)
    if records:
        tensor.record_stream(side)
    del tensor
    message = _error_of(lambda: torch.empty(1000))
    if records:
        assert message == ""
    else:
        assert message.startswith("race on ")
        assert "a new allocation on stream 0 writes what aten::sum" in message
