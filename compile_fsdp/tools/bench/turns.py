"""Measure the steps of a running script, which are eager and compiled in turns.

`torch.compiler.set_stance` switches between the modes. Eager and compiled steps compute equal results, so the training
goes on unchanged. A step ends when the script's optimizers have made their steps. Everything between two such ends
counts, such as data loading.

[Note: Profiles in optimizer steps]
A memory profile starts and stops in a hook, inside the event that torch records for the optimizer's step. When that
event ends, the profile in which it began has stopped. No new profile may be running then, because torch would write
into an event of the stopped profile. So a step without a profile separates two profiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from compile_fsdp.errors import ScriptError
from compile_fsdp.reports import count_captures, reports
from compile_fsdp.state.ranks import gather
from compile_fsdp.tools.bench.measure import (
    STEPS_PER_TURN,
    Result,
    allocated_bytes,
    await_frees,
    make_result,
    profile_allocations,
    synchronize,
)
from compile_fsdp.tools.scripts import Steps
from compile_fsdp.torch_compat.distributed import executed_collectives

EAGER, COMPILE = MODES = ("eager", "compile")
WARM_STEPS = 2  # of each mode before the turns; compiled steps are warm if they compile nothing
MOST_COLD_STEPS = 8  # maximum number of compiled steps until WARM_STEPS in a row are warm
PROFILED_STEPS = 3  # on a CPU, for a median, because gloo's threads may still hold tensors of an earlier step

T = TypeVar("T")
Turns = Generator[None, None, T]
"""Part of a measurement: resumed after each step of the script, returns the measured values."""


def steps_needed(rounds: int) -> int:
    """Maximum number of steps that a measurement needs if the script compiles no more than once."""
    return 2 * WARM_STEPS + 1 + 2 * (1 + 2 * PROFILED_STEPS) + 2 * rounds * (1 + STEPS_PER_TURN)


class ScriptTurns:
    """Measurement of a running script; decides after each step how the next step runs. Collective."""

    def __init__(self, rounds: int) -> None:
        # Results by mode, from the second round on, or the error that ended the measurement; None before.
        self.outcome: dict[str, Result] | ScriptError | None = None
        self.rounds = 0  # number of measured rounds
        self._most_rounds = rounds
        self._is_over = False
        self._steps = Steps(limit=1)
        self._device = torch.device("cpu")
        self._turns = self._measure()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the script's steps eager or compiled in turn inside the block."""
        next(self._turns)
        try:
            yield
        finally:
            self._turns.close()  # restores the stance

    @property
    def steps(self) -> int:
        return self._steps.limit - 1

    def count(self, optimizer: Optimizer) -> bool:
        """Count an optimizer's step; return whether the measurement is over."""
        if not self._is_over and self._steps.count(optimizer):
            self._steps.limit += 1
            devices = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
            self._device = next(devices, self._device)
            try:
                next(self._turns)
            except StopIteration:
                self._is_over = True
            except ScriptError as error:
                self.outcome, self._is_over = error, True
        return self._is_over

    def _measure(self) -> Turns[None]:
        with _running(EAGER):
            for _ in range(WARM_STEPS):
                yield
        first_s = yield from self._compile()
        first = {EAGER: None, COMPILE: first_s}
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        peaks: dict[str, list[int]] = {mode: [] for mode in MODES}
        collectives = {}
        for mode in MODES:
            collectives[mode], peaks[mode] = yield from self._look(mode)
        for attempt in range(2 * self._most_rounds):
            turns = {}
            for mode in MODES if attempt % 2 == 0 else reversed(MODES):
                turns[mode] = yield from self._turn(mode)
            if any(has_compiled for _, _, has_compiled in turns.values()):
                continue
            for mode, (step_s, highest, _) in turns.items():
                seconds[mode].append(step_s)
                peaks[mode] += [] if self._device.type == "cpu" else [highest]
            self.rounds += 1
            if self.rounds > 1:
                peak = {mode: int(statistics.median(peaks[mode])) for mode in MODES}
                self.outcome = {
                    mode: make_result(mode, seconds, peak[mode], collectives[mode], first[mode]) for mode in MODES
                }
            if self.rounds == self._most_rounds:
                return
        raise ScriptError(
            f"expected warm steps, got a compiled one that was compiled again in {self._most_rounds} of "
            f"{2 * self._most_rounds} turns; compile-fsdp check says what for"
        )

    def _compile(self) -> Turns[float]:
        """Run compiled steps until `WARM_STEPS` in a row are warm; return seconds of the first step."""
        known, captures = len(reports()), count_captures()
        first_s, warm = 0.0, 0
        for step in range(MOST_COLD_STEPS):
            start = time.perf_counter()
            yield
            synchronize(self._device)
            first_s = first_s if step else time.perf_counter() - start
            before, captures = captures, count_captures()
            warm = 0 if any(gather(captures != before)) else warm + 1
            if step + 1 >= WARM_STEPS and not all(gather(len(reports()) > known)):
                raise ScriptError(
                    f"expected a script that compiles its model with compile_fsdp, got no graph in {step + 1} steps; "
                    "compile-fsdp check says why"
                )
            if warm == WARM_STEPS:
                return max(gather(first_s))
        raise ScriptError(
            f"expected a warm step, got one that was compiled again in each of {MOST_COLD_STEPS}; compile-fsdp check "
            "says what for"
        )

    def _turn(self, mode: str) -> Turns[tuple[float, int, bool]]:
        """Run one turn.

        Returns the ranks' highest median step time, their highest bytes allocated on the device at a time, 0 on a CPU,
        and whether a rank compiled.
        """
        captures = count_captures()
        module = None if self._device.type == "cpu" else torch.get_device_module(self._device)
        with _running(mode):
            yield  # not measured, because the step before may have run in a different mode
            synchronize(self._device)
            if module is not None:
                module.reset_peak_memory_stats(self._device)
            dist.barrier()
            ends = [time.perf_counter()]
            for _ in range(STEPS_PER_TURN):
                yield
                synchronize(self._device)
                ends.append(time.perf_counter())
        # The median, because an evaluation at a fixed interval may meet the turns of one mode only.
        step_s = statistics.median(end - start for start, end in pairwise(ends))
        peak = 0 if module is None else int(module.max_memory_allocated(self._device))
        found = gather((step_s, peak, captures != count_captures()))
        return max(each[0] for each in found), max(each[1] for each in found), any(each[2] for each in found)

    def _look(self, mode: str) -> Turns[tuple[int, list[int]]]:
        """Return the fewest collectives of several steps, and their highest less lowest allocated bytes on a CPU.

        A script may evaluate or save in some steps.
        """
        peaks: list[int] = []
        with _running(mode):
            yield
            issued = [executed_collectives()]
            for _ in range(PROFILED_STEPS if self._device.type == "cpu" else 1):
                # See [Note: Profiles in optimizer steps].
                yield
                issued.append(executed_collectives())
                if self._device.type != "cpu":
                    continue
                profile = profile_allocations()
                profile.start()
                yield
                issued.append(executed_collectives())
                await_frees()
                profile.stop()
                levels = allocated_bytes(profile)
                peaks.append(max(levels) - min(levels))
        return min(after - before for before, after in pairwise(issued)), peaks


@contextmanager
def _running(mode: str) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager" if mode == EAGER else "default"):
        yield
