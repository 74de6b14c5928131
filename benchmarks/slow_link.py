"""Do measured costs pay where the link is slower than the built-in costs expect? On two ranks of the emulated device.

    PYTHONPATH=tests python benchmarks/slow_link.py [--model compute] [--slower 10] [--rounds 7]

A collective takes no less time than on a link that is so many times slower than the built-in costs of a CPU have it.
Steps that are decided by these built-in costs take turns with steps that are decided by what was measured on the link;
the result is the median over the rounds of measured over built-in, with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import torch.distributed as dist

from compile_fsdp.passes.analysis.costs import COSTS
from compile_fsdp.reports import reports
from compile_fsdp.tools.bench.llama import SIZES
from compile_fsdp.tools.bench.measure import STEPS_PER_TURN, Run
from compile_fsdp.tools.bench.modes import MODES
from compile_fsdp.tools.calibrate.measure import measure

SETTINGS = {"default": {}, "budget": {"memory_budget": 100 * 2**20}}  # of the model `compute`, which takes 135 MiB


def compare(rank: int, model: str, slower: float, rounds: int) -> list[str]:
    """The lines of the result."""
    from helpers.device.install import install

    install().set_detecting(False)
    usual = COSTS["cpu"]
    install().set_link(usual.latency * slower, usual.comm_bandwidth / slower)
    measured_costs = measure(dist.group.WORLD, torch.device("emulated"), torch.float32).costs(COSTS["cuda"])
    lines = []
    for name, options in SETTINGS.items():
        runs = []
        for costs in (usual, measured_costs):
            MODES["of these costs"] = partial(MODES["compile"], costs=costs, **options)
            runs.append(Run("of these costs", SIZES[model], rank))
            for _ in range(2):
                runs[-1].step()
        used = [report.costs for report in reports() if report.direction == "forward"][-1]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for run, found in zip(runs, times, strict=True):
                found.append(run.time(STEPS_PER_TURN))
        ratios = [measured / built_in for built_in, measured in zip(*times, strict=True)]
        first, ratio, last = statistics.quantiles(ratios, n=4)
        built_in, measured = (statistics.median(found) * 1e3 for found in times)
        peaks = [run.peak_bytes() / 2**20 for run in runs]
        lines.append(
            f"{name}: {measured:.0f} ms measured, {built_in:.0f} ms built-in, {ratio:.2f} [{first:.2f}, {last:.2f}]; "
            f"peak {peaks[1]:.0f} and {peaks[0]:.0f} MiB; {used}"
        )
    return lines


if __name__ == "__main__":
    from helpers.ranks.pools import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SIZES), default="compute")
    parser.add_argument("--slower", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found = run_ranks(2, compare, args.model, args.slower, args.rounds, device="emulated", timeout_s=3600.0)
    print("\n".join(found[0]))
