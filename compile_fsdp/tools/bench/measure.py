"""Measure time, memory and collectives of training steps in several modes that take turns, and show the results."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from compile_fsdp.tools.bench.llama import Decoder
from compile_fsdp.tools.bench.modes import MODES
from compile_fsdp.torch_compat.autograd import allocation_sizes
from compile_fsdp.torch_compat.distributed import executed_collectives

STEPS_PER_TURN = 3


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of one mode with one workload."""

    ratio: float  # median over the rounds of the step time divided by the step time of `eager` in that round
    spread: tuple[float, float]  # lower and upper quartile of these ratios
    step_ms: float  # median time of a step, forward and backward, on the slowest rank
    # Peak memory of one step on this rank, less the memory allocated before the step. On a CPU, the median of several
    # steps, because gloo's threads may still hold tensors of the last collective. For a script on an accelerator, all
    # allocated memory, on the rank with the highest peak.
    peak_mib: float
    collectives: int  # that this rank issues in one step
    first_step_s: float | None  # of the first step, which compiles or loads cached graphs; None if not measured


class Run:
    """The model and the batch of one mode, on the default device."""

    def __init__(self, mode: str, workload: Decoder, rank: int) -> None:
        torch.manual_seed(0)
        self.model = MODES[mode](workload.build())
        torch.manual_seed(1 + rank)
        tokens = torch.randint(0, workload.model.vocab_size, (workload.batch, workload.seq_len + 1))
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self) -> None:
        self.model(self._inputs, self._targets).backward()
        self.model.zero_grad()

    def time(self, steps: int) -> float:
        """Seconds per step on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self._inputs.device)
        seconds = torch.tensor((time.perf_counter() - start) / steps)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def count_collectives(self) -> int:
        before = executed_collectives()
        self.step()
        return executed_collectives() - before

    def peak_bytes(self) -> int:
        """`peak_bytes` of one step; on the CPU, the median of five steps."""
        device = self._inputs.device
        runs = 5 if device.type == "cpu" else 1
        return int(statistics.median(peak_bytes(self.step, device) for _ in range(runs)))


def synchronize(device: torch.device) -> None:
    """Wait until this process's device has finished its work; return at once on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that `run` allocates in the device's memory, less the bytes allocated before it.

    On the CPU, the sizes come from the allocator's profile events, and the call is collective: all ranks make it.
    """
    if device.type == "cpu":
        with profile_allocations() as profile:
            run()
            await_frees()
        return max(allocated_bytes(profile))
    module = torch.get_device_module(device)
    synchronize(device)
    module.reset_peak_memory_stats(device)
    before: int = module.memory_allocated(device)
    run()
    return int(module.max_memory_allocated(device)) - before


def profile_allocations() -> torch.profiler.profile:
    """A memory profile of the CPU, to start and stop."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps the profiler from printing a line for every profile
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def await_frees() -> None:
    """Wait inside a profile until collectives on the CPU have freed their tensors.

    gloo's threads free a collective's tensors some time after the collective ends. They report the release to the
    profiler that was active at the launch, so this profiler must still exist. Collective.
    """
    dist.barrier()
    time.sleep(0.02)


def allocated_bytes(profile: torch.profiler.profile) -> list[int]:
    """Bytes allocated at the start of a finished memory profile and after each event.

    Bytes allocated before the profile do not count, so a level is negative if the profile frees them.
    """
    return [0, *accumulate(allocation_sizes(profile))]


def measure(workload: Decoder, modes: Sequence[str], rounds: int) -> dict[str, Result]:
    """Train with the modes in turn, for at least 2 rounds. Collective; `modes` must include "eager"."""
    rank = dist.get_rank()
    runs = {mode: Run(mode, workload, rank) for mode in modes}
    first = {mode: run.time(1) for mode, run in runs.items()}
    for run in runs.values():
        run.time(2)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else reversed(modes):
            seconds[mode].append(runs[mode].time(STEPS_PER_TURN))
    collectives = {mode: run.count_collectives() for mode, run in runs.items()}
    peaks = {mode: run.peak_bytes() for mode, run in runs.items()}
    return {mode: make_result(mode, seconds, peaks[mode], collectives[mode], first[mode]) for mode in modes}


def make_result(
    mode: str, seconds: Mapping[str, Sequence[float]], peak_bytes: int, collectives: int, first_step_s: float | None
) -> Result:
    """Make the result of one mode from the seconds of each mode's steps by round; see `Result`."""
    ratios = [mine / theirs for mine, theirs in zip(seconds[mode], seconds["eager"], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    step_ms = 1000 * statistics.median(seconds[mode])
    return Result(statistics.median(ratios), (lower, upper), step_ms, peak_bytes / 2**20, collectives, first_step_s)


def format_table(name: str, table: Mapping[str, Result]) -> str:
    """Format the results of one workload as a table in Markdown."""
    lines = [
        f"| {name} | step / eager | quartiles | ms | peak MiB | collectives | first step, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, result in table.items():
        lower, upper = result.spread
        first = "-" if result.first_step_s is None else f"{result.first_step_s:.1f}"
        lines.append(
            f"| `{mode}` | {result.ratio:.2f} | {lower:.2f} to {upper:.2f} | {result.step_ms:.1f} | "
            f"{result.peak_mib:.1f} | {result.collectives} | {first} |"
        )
    return "\n".join([*lines, ""])


def describe_gain(table: Mapping[str, Result], rounds: int, ranks: int) -> str:
    """Compare a step of "compile" with a step of "eager" in one sentence."""
    eager, compiled = table["eager"], table["compile"]
    lower, upper = compiled.spread
    # On a CPU, the peak counts only memory that the step allocates, so it can be 0.
    memory = f" and {compiled.peak_mib / eager.peak_mib:.2f} of its peak memory" if eager.peak_mib > 0 else ""
    unclear = ", so no clear difference" if lower <= 1 <= upper else ""
    return (
        f"Measured on {ranks} ranks: a compiled step takes {compiled.ratio:.2f} of an eager step's time (quartiles of "
        f"{rounds} rounds {lower:.2f} to {upper:.2f}{unclear}){memory}."
    )


def write_json(tables: Mapping[str, Mapping[str, Result]], ranks: int, path: Path) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    results = {name: {mode: asdict(result) for mode, result in table.items()} for name, table in tables.items()}
    head = {"torch": torch.__version__, "ranks": ranks, "device": device.type}
    path.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
