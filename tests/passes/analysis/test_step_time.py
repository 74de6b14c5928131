"""Clocks, links and sums of live bytes."""

from __future__ import annotations

from compile_fsdp.passes.analysis.step_time import Clock, Link, LiveBytes


def test_clock_finds_the_positions_around_a_second() -> None:
    clock = Clock([1.0, 2.0, 4.0])
    assert clock.starts == [0.0, 1.0, 3.0]
    assert [clock.last_before(second) for second in (-1.0, 0.5, 1.0, 9.0)] == [0, 0, 1, 2]
    assert [clock.first_after(second) for second in (-1.0, 0.5, 1.0, 9.0)] == [0, 1, 1, 2]


def test_link_carries_one_transfer_at_a_time() -> None:
    link = Link()
    assert [link.send(1.0, 2.0), link.send(2.0, 1.0), link.send(9.0, 1.0)] == [1.0, 3.0, 9.0]
    assert link.free == 10.0


def test_bytes_are_held_from_the_first_to_the_last_place() -> None:
    live = LiveBytes(4)
    live.hold(0, 1, 8)
    live.hold(1, 3, 2)
    live.hold(2, 1, 100)
    assert live.totals() == [8, 10, 2, 2]
