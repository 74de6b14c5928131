"""Does a step take longer after thousands of steps?

One process with the fake process group trains a stack of tiny layers, in eager FSDP2 and compiled in turn, so that what
else the machine does meets both. Medians of each tenth of the steps: a table that grows, or a list that is walked,
would show.

    python benchmarks/drift.py [--steps 5000] [--modules 8]
"""

from __future__ import annotations

import argparse
import statistics

import torch

from compile_fsdp.tools import launch
from overhead import MODES, WIDTH, time_step

PARTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--modules", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with launch.fake_world(8):
        batch = torch.randn(2, WIDTH)
        models = {mode: MODES[mode](options.modules) for mode in ("eager", "compile_fsdp")}
        for model in models.values():
            for _ in range(50):
                time_step(model, batch)
        times: dict[str, list[float]] = {mode: [] for mode in models}
        for _ in range(options.steps):
            for mode, model in models.items():
                times[mode].append(time_step(model, batch))
    length = options.steps // PARTS
    print("| steps | " + " | ".join(f"`{mode}`, us" for mode in models) + " | ratio |")
    print("| --- |" + " ---: |" * (len(models) + 1))
    for start in range(0, length * PARTS, length):
        us = [1e6 * statistics.median(times[mode][start : start + length]) for mode in models]
        row = " | ".join(f"{each:.0f}" for each in us)
        print(f"| {start} to {start + length} | {row} | {us[1] / us[0]:.3f} |")


if __name__ == "__main__":
    main()
