"""Outputs of a compiled forward graph that are views of one tensor.

The boundary detaches outputs, and for autograd a detached view is no view: a write in place into one output would not
reach the gradients of the others. So the boundary returns the tensor once, and the views are taken of it outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class OutputViews(NamedTuple):
    """A graph's outputs as the boundary returns them."""

    # The outputs, with None in the place of views of one tensor, and behind them such tensors that are no outputs.
    tensors: list[Any]
    output_count: int
    views: dict[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]]  # position in `tensors`, and view of it

    @classmethod
    def of(cls, outputs: Sequence[Any]) -> OutputViews:
        bases = {i: base for i, out in enumerate(outputs) if (base := _base(out)) is not None}
        uses = Counter(map(id, (*bases.values(), *outputs)))
        shared = {i: base for i, base in bases.items() if uses[id(base)] > 1}
        tensors = [None if i in shared else out for i, out in enumerate(outputs)]
        positions = {id(out): i for i, out in enumerate(tensors)}
        for base in shared.values():
            if id(base) not in positions:
                positions[id(base)] = len(tensors)
                tensors.append(base)
        views = {i: (positions[id(base)], outputs[i]._view_func) for i, base in shared.items()}
        return cls(tensors, len(outputs), views)

    def take(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs, with views of the boundary's `tensors`."""
        outputs = list(tensors[: self.output_count])
        for i, (position, view) in self.views.items():
            outputs[i] = view(tensors[position])
        return tuple(outputs)


def _base(output: Any) -> torch.Tensor | None:
    """Return the tensor that an output with a gradient is a view of, or None."""
    return output._base if isinstance(output, torch.Tensor) and output.requires_grad else None
