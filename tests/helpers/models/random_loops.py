"""Random training loops of fixed models.

`helpers.models.random_programs` varies the model with a fixed loop. Here the models are fixed, and the loop reads,
writes, gathers, frees, evaluates, resets and accumulates at any place of a step.

[Note: Order of additions]
A parameter that both eager code and a graph use gets a gradient from each. The sum of two values does not depend on
their order, but the sum of three or more does: eager autograd adds all gradients of a backward one after the other,
while a compiled backward first adds the gradients of one forward graph. A backward without a reduction leaves one more
value to add. Loops with such sums run in float64 and may differ by `REORDERED` of the largest value; in float32 the
rounding of one step would grow in the next steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REORDERED = 1e-9  # relative; see [Note: Order of additions]

MODELS = ("mlp", "head", "kept", "checkpointed", "resharded", "hybrid")
BLOCKS = ("blocks.0", "blocks.1")
PARAMETERS = ("scale", "end.weight", "end.bias", "blocks.0.0.weight", "blocks.1.0.bias")
SETTERS = (
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_is_last_backward",
    "set_requires_all_reduce",
)


class Action(NamedTuple):
    """One statement of a training loop; `Training` has a method for each kind."""

    kind: str  # name of the method
    target: str = ""  # name of a parameter or module; empty for the root, or for all of them
    value: Any = None  # its argument

    def __str__(self) -> str:
        arguments = [self.target] if self.target else []
        if isinstance(self.value, tuple):
            arguments += map(str, self.value)
        elif self.value is not None:
            arguments.append(str(self.value))
        return f"{self.kind}({', '.join(arguments)})"


class Loop(NamedTuple):
    """A model and the steps that train it."""

    model: str  # one of MODELS
    steps: tuple[tuple[Action, ...], ...]
    inner_backend: str = "aot_eager"
    seed: int = -1  # that the loop was drawn with; -1 for a loop written by hand
    replay: bool = False  # whether the compiled model replays its steps

    def __str__(self) -> str:
        options = f"{self.inner_backend}{', replay' if self.replay else ''}"
        lines = [f"loop {self.seed}, model {self.model}, {options}:"]
        return "\n".join([*lines, *(f"  step {i}: {', '.join(map(str, each))}" for i, each in enumerate(self.steps))])

    @property
    def adds_in_another_order(self) -> bool:
        """Whether a gradient may have three or more terms. See [Note: Order of additions]."""
        waiting, reduced = 0, 0  # number of terms of the next backward, and of gradients before it
        for action in (action for step in self.steps for action in step):
            match action.kind:
                case "set" if action.value[0] == "set_requires_gradient_sync":
                    return True
                case "zero_grad" if not action.target:
                    reduced = 0
                case "backward":
                    is_several = action.value in ("again", "apart", "freed")
                    if waiting + is_several > 2:
                        return True
                    waiting, reduced = 0, 1
                case "forward":
                    waiting += 3 if action.value == "chunks" else 1
                case "part":
                    waiting += 2  # eager FSDP2 reduces this gradient separately from the whole model's
                case "penalty" | "write_gradient":
                    waiting += 1
            if waiting + reduced > 2:
                return True
        return False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and batches."""
        return torch.float64 if self.tolerance else torch.float32

    @property
    def tolerance(self) -> float:
        """Largest relative difference between eager and compiled training."""
        return REORDERED if self.adds_in_another_order or self.inner_backend != "aot_eager" else 0.0

    @property
    def has_reference(self) -> bool:
        """Whether training without sharding computes equal values up to rounding."""
        actions = [action for step in self.steps for action in step]
        if self.model == "resharded" and any(action.value in ("scaled", "chunks") for action in actions):
            return False  # eager code multiplies by a DTensor, whose gradient covers only this rank's batch
        is_gathered = is_shown = False  # whether parameters are gathered, and whether modules show gathered ones
        for action in actions:
            if action.kind in ("backward", "input_gradient"):
                is_gathered = is_shown = False
            elif action.kind == "step" and is_gathered:
                return False  # the next forward computes with parameters that FSDP2 gathered before the update
            elif action.kind == "zero_grad" and action.target and is_shown:
                return False  # the module's gradients are those of its gathered parameters
            elif action.kind in ("part", "evaluate", "no_grad"):
                is_gathered = is_shown = True
            elif action.kind == "forward":
                is_shown = True
        return all(action.kind in _COMMON and action.value != "gradient" for action in actions)


# Actions that an unsharded model can take on any rank's batch.
_COMMON = (
    *("forward", "part", "evaluate", "no_grad", "backward", "input_gradient"),
    *("penalty", "zero_grad", "step", "state_dict", "stance"),
)


def random_loop(seed: int, inner_backend: str = "aot_eager") -> Loop:
    """Draw the loop of a seed."""
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    kinds = _PLAIN if draw.random() < 0.25 else _KINDS
    steps = tuple(_step(draw, model, kinds, is_first=number == 0) for number in range(draw.choice((2, 3, 3))))
    return Loop(model, steps, inner_backend, seed, replay=draw.random() < 0.5)


def _step(draw: random.Random, model: str, kinds: tuple[str, ...], is_first: bool) -> tuple[Action, ...]:
    actions = [] if is_first else _some(draw, (0, 0, 1), kinds)  # a forward of the model finds the root
    actions.append(_forward(draw))
    actions += _some(draw, (0, 1, 1, 2), kinds)
    if draw.random() < 0.25:
        actions.append(_DRAWS[draw.choice(("forward", "part"))](draw))
        actions += _some(draw, (0, 0, 1), kinds)
    backward = _backward(draw, any(action.value == "two" for action in actions))
    # The compiled backward refuses torch.autograd.grad by a sharded parameter. For a parameter that the forward reads
    # and leaves unsharded, the gradient silently lacks the compiled graph's part.
    can_ask = model in ("head", "resharded")
    actions.append(backward if can_ask or backward.value != "gradient" else Action("backward"))
    actions += _some(draw, (0, 0, 1), kinds)
    if draw.random() < 0.8:
        actions.append(Action("step", draw.choice(("", "", "", "root", "blocks"))))
        actions.append(Action("zero_grad", value=draw.random() < 0.7))
    return tuple(actions)


def _some(draw: random.Random, counts: tuple[int, ...], kinds: tuple[str, ...]) -> list[Action]:
    return [_DRAWS[draw.choice(kinds)](draw) for _ in range(draw.choice(counts))]


def _forward(draw: random.Random) -> Action:
    value = draw.choice((None, None, None, "scaled", "scaled", "chunks", "two", "hooked"))
    return Action("forward", draw.choice(PARAMETERS) if value == "hooked" else "", value)


def _backward(draw: random.Random, has_two: bool) -> Action:
    value = draw.choice((None, None, None, None, "apart", "apart", "again", "freed", "gradient"))
    if (value == "gradient" and draw.random() < 0.7) or (value == "freed" and has_two):
        value = None  # the compiled backward or eager FSDP2 nearly always refuses these
    return Action("backward", "end.weight" if value == "gradient" else "", value)


def _gather(draw: random.Random) -> Action:
    if draw.random() < 0.5:
        return Action("reshard", draw.choice(("", *BLOCKS)))
    return Action("unshard", draw.choice(("", *BLOCKS)), draw.random() < 0.3)


_DRAWS: dict[str, Callable[[random.Random], Action]] = {
    "evaluation": lambda draw: Action(draw.choice(("evaluate", "no_grad", "input_gradient"))),
    "failing": lambda draw: Action("failing", value=draw.choice(("forward", "backward"))),
    "forward": _forward,
    "gather": _gather,
    "part": lambda draw: Action("part", draw.choice(BLOCKS)),
    "penalty": lambda draw: Action("penalty", draw.choice(PARAMETERS), draw.choice((None, None, "detached"))),
    "requires_grad": lambda draw: Action("requires_grad", draw.choice(("end", *BLOCKS)), draw.random() < 0.4),
    "set": lambda draw: Action("set", draw.choice(("", "", *BLOCKS)), (draw.choice(SETTERS), draw.random() < 0.5)),
    "stance": lambda draw: Action("stance", value="force_eager"),
    "state": lambda draw: Action(draw.choice(("state_dict", "load_state_dict"))),
    "write": lambda draw: Action("write", draw.choice(PARAMETERS)),
    "write_gradient": lambda draw: Action(
        "write_gradient", draw.choice(PARAMETERS), draw.choice(("set", "scale", "drop"))
    ),
    "zero_grad": lambda draw: Action("zero_grad", draw.choice(("", "end", *BLOCKS)), draw.random() < 0.5),
}
# Actions that training without sharding can reproduce, and all actions. Repeated names are drawn more often.
_PLAIN = ("penalty", "penalty", "zero_grad", "evaluation", "part", "stance")
_KINDS = (
    *("penalty", "penalty", "penalty", "write", "write_gradient", "zero_grad", "evaluation", "part"),
    *("requires_grad", "state", "stance", "gather", "gather", "set", "set", "failing"),
)
