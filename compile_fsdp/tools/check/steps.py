"""End a script after its first training steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_fsdp.errors import ScriptError


class _EnoughSteps(BaseException):
    """Ends the script; not an `Exception`, because the script's handlers may catch those."""


@dataclass(slots=True)
class Steps:
    """The steps that a script's optimizers have made.

    `end`: the exception that ended the script, empty if the script ran to its own end. Its traceback keeps the script's
    objects alive.
    """

    limit: int  # number of steps of each optimizer after which the script ends
    by_optimizer: weakref.WeakKeyDictionary[Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)
    made: int = 0  # number of steps of the optimizer with the most steps
    end: list[BaseException] = field(default_factory=list)

    def count(self, optimizer: Optimizer) -> bool:
        """Count one step; return whether the script has made enough steps.

        A script may have several optimizers, for example one for each parameter, stepped in the backward, or one for
        each of two models. All optimizers must reach the limit, except that after `2 * limit + 1` steps of one
        optimizer, `count` no longer waits for optimizers that step rarely.
        """
        self.by_optimizer[optimizer] = self.by_optimizer.get(optimizer, 0) + 1
        counts = list(self.by_optimizer.values())
        self.made = max(counts)
        return min(counts) >= self.limit or self.made >= 2 * self.limit + 1


@contextmanager
def ended_by(count: Callable[[Optimizer], bool], end: list[BaseException] | None = None) -> Iterator[None]:
    """End the block without an error as soon as `count`, called after each step of any optimizer, returns True.

    `end` gets the exception that ends the block.
    """

    def receive(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count(optimizer):
            raise _EnoughSteps

    # Disabled, because Dynamo would trace the hook if a script compiles its optimizer's step.
    handle = register_optimizer_step_post_hook(torch.compiler.disable(receive))
    try:
        yield
    except _EnoughSteps as error:
        if end is not None:
            end.append(error)
    finally:
        handle.remove()


@contextmanager
def ended_after(limit: int) -> Iterator[Steps]:
    """End the block without an error after `limit` steps of each optimizer, see `Steps.count`.

    Raises:
        ScriptError: if `limit` is less than 1.
    """
    if limit < 1:
        raise ScriptError(f"expected --steps to be at least 1, got {limit}")
    steps = Steps(limit)
    with ended_by(steps.count, steps.end):
        yield steps
