"""Are 20 steps equal to eager ones, with accumulation and evaluation between, also if CUDA graphs replay them?"""

from __future__ import annotations

from typing import Any

import torch

from gpu_kit.common import batch, build_pair, parser, start_alone, table, worst_difference


def main() -> None:
    options = parser(__doc__).parse_args()
    start_alone(options.device)
    modes: dict[str, dict[str, Any]] = {"no CUDA graph": {}}
    if options.device != "cpu":
        modes["CUDA graphs"] = {"mode": "reduce-overhead"}
    rows = [(name, *_train(compile_args)) for name, compile_args in modes.items()]
    head = ("20 steps with", "largest difference of a loss", "largest difference of a gradient")
    print(table(head, [(name, *(f"{worst:.1e}" for worst in worsts)) for name, *worsts in rows]))
    assert all(loss <= 1e-3 and gradient <= 1e-2 for _, loss, gradient in rows)


def _train(compile_args: dict[str, Any]) -> tuple[float, float]:
    """Train an eager and a compiled model; return the largest difference of a loss and of a gradient."""
    eager, ours = build_pair(**compile_args)
    worst_gradient = worst_loss = 0.0
    for step in range(20):
        microbatches = 2 if step % 5 == 3 else 1
        for part in range(microbatches):
            inputs = batch(100 * step + part)
            losses = [model(*inputs) for model in (ours, eager)]
            for loss in losses:
                loss.backward()
            mine, theirs = (loss.item() for loss in losses)
            worst_loss = max(worst_loss, abs(mine - theirs) / abs(theirs))
        worst_gradient = max(worst_gradient, worst_difference(ours, eager))
        for model in (ours, eager):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
            model.zero_grad()
        if step % 5 == 4:
            with torch.no_grad():
                mine, theirs = (model(*batch(-step)).item() for model in (ours, eager))
            worst_loss = max(worst_loss, abs(mine - theirs) / abs(theirs))
    return worst_loss, worst_gradient


if __name__ == "__main__":
    main()
