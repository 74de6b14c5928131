"""A compiled forward graph, as its runs read it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from compile_fsdp.backend.step import Step


@dataclass(frozen=True, slots=True)
class ParameterInputs:
    """Positions of a graph's inputs that are unsharded parameters.

    Attributes:
        managed: All of them.
        parts: Positions in `managed` of parts of parameters that are tensor subclasses.
        read: Positions in `managed` of parameters that the graph computes with; only these may get a gradient.
        whole: Positions in `managed` of parameters whose module runs in this graph from its inputs to its outputs.
        pre_backward_elsewhere: Positions in `managed` of parameters whose pre-backward hook is in a different graph,
            behind a graph break.
        left_unsharded: Positions in `managed` of parameters that the graph leaves unsharded for its backward.
    """

    managed: tuple[int, ...]
    parts: tuple[int, ...]
    read: frozenset[int]
    whole: frozenset[int]
    pre_backward_elsewhere: frozenset[int]
    left_unsharded: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class CompiledForward:
    """A compiled forward graph that reads unsharded parameters.

    Only its inputs tell its parameter groups, because Dynamo runs one graph for several modules of a class if it
    compiles their forward as a separate frame.

    Attributes:
        run: The graph, compiled by the inner backend. If the step has lifted hooks, it takes the inputs that
            `step.hooks.split` returns.
        whole_of: The called module if its whole forward is in the graph; else None.
    """

    run: Callable[..., Sequence[Any]]
    parameters: ParameterInputs
    whole_of: weakref.ref[nn.Module] | None
    step: Step
