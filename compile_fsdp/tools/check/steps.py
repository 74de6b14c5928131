"""Ends a script after its first training steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class _EnoughSteps(BaseException):
    """Ends the script. No `Exception`, so that a script's own handlers let it pass."""


@dataclass(slots=True)
class Ending:
    """How a script was ended.

    Attributes:
        exception: What has ended it; None if it ran to its own end. While it is there, so is all that the script has
            made.
    """

    exception: BaseException | None = None


@dataclass(slots=True)
class Steps:
    """The steps that a script's optimizers have made.

    Attributes:
        limit: After how many the script ends.
        by_optimizer: How many each optimizer has made.
        made: The most that one has made.
        end: What has ended the script.
    """

    limit: int
    by_optimizer: weakref.WeakKeyDictionary[Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)
    made: int = 0
    end: Ending = field(default_factory=Ending)

    def count(self, optimizer: Optimizer) -> bool:
        """Count one step, and say whether these are enough.

        A script may have several optimizers: one for each parameter, stepped in the backward, or one for each of two
        models. All are to have made their steps, unless one seems to be stepped rarely.
        """
        self.by_optimizer[optimizer] = self.by_optimizer.get(optimizer, 0) + 1
        counts = list(self.by_optimizer.values())
        self.made = max(counts)
        return min(counts) >= self.limit or self.made >= 2 * self.limit + 1


@contextmanager
def ended_by(count: Callable[[Optimizer], bool]) -> Iterator[Ending]:
    """End the block, without an error, behind the step of an optimizer that was enough.

    Args:
        count: Is called with the optimizer behind each step of any, and says whether that was enough.
    """

    def receive(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count(optimizer):
            raise _EnoughSteps

    ending = Ending()
    # Disabled, since Dynamo would trace it where a script compiles the step of its optimizer.
    handle = register_optimizer_step_post_hook(torch.compiler.disable(receive))
    try:
        yield ending
    except _EnoughSteps as end:
        ending.exception = end
    finally:
        handle.remove()


@contextmanager
def ended_after(limit: int) -> Iterator[Steps]:
    """End the block, without an error, once its optimizers have made so many steps.

    Args:
        limit: Steps of each optimizer.
    """
    steps = Steps(limit)
    with ended_by(steps.count) as steps.end:
        yield steps
