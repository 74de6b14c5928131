"""Is a step compiled with Inductor equal to the eager one, in one forward and one backward graph? On one rank."""

from __future__ import annotations

import time

import torch

import compile_fsdp
from compile_fsdp.tools.bench.measure import synchronize
from gpu_kit.common import batch, build_pair, parser, start_alone, table, worst_difference


def main() -> None:
    options = parser(__doc__).parse_args()
    start_alone(options.device)
    eager, ours = build_pair()
    rows = []
    for step in range(4):
        inputs = batch(step)
        start = time.perf_counter()
        loss = ours(*inputs)
        loss.backward()
        synchronize(torch.device(options.device))
        seconds = time.perf_counter() - start
        expected = eager(*inputs)
        expected.backward()
        difference = worst_difference(ours, eager)
        rows.append((step, f"{loss.item():.6f}", f"{expected.item():.6f}", f"{difference:.1e}", f"{seconds:.3f}"))
        assert abs(loss.item() - expected.item()) <= 1e-4 * abs(expected.item()), rows
        assert difference <= 1e-3, rows
        for model in (ours, eager):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
            model.zero_grad()
    print(table(("step", "loss, compiled", "loss, eager", "largest difference of a gradient", "seconds"), rows))
    directions = [report.direction for report in compile_fsdp.reports()]
    print(f"Graphs: {', '.join(directions)}.")
    assert directions == ["forward", "backward"], directions


if __name__ == "__main__":
    main()
