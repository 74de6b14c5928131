"""Are 20 steps equal to eager ones, with accumulation and evaluation between them? And are CUDA graphs refused?"""

from __future__ import annotations

import torch

from compile_fsdp.errors import UnknownOptionError
from gpu_kit.common import batch, build_pair, parser, start_alone, table, worst_difference


def main() -> None:
    options = parser(__doc__).parse_args()
    start_alone(options.device)
    try:
        build_pair(mode="reduce-overhead")
    except UnknownOptionError as error:
        print(f"`mode='reduce-overhead'` is refused: {str(error).splitlines()[0]}\n")
    else:
        raise AssertionError("CUDA graphs were not refused")
    eager, ours = build_pair()
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
    head = ("steps", "largest difference of a loss", "largest difference of a gradient")
    print(table(head, [(20, f"{worst_loss:.1e}", f"{worst_gradient:.1e}")]))
    assert worst_loss <= 1e-3 and worst_gradient <= 1e-2


if __name__ == "__main__":
    main()
