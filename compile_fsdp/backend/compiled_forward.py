"""A compiled forward graph, as its runs read it, and the inputs of one run."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from compile_fsdp.backend.step import Step
from compile_fsdp.runtime import calls
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.torch_compat.distributed import stage_forward_code


@dataclass(frozen=True, slots=True)
class ParameterInputs:
    """Positions of a graph's inputs that are unsharded parameters: `managed` has all of them, the others a part."""

    managed: tuple[int, ...]
    parts: tuple[int, ...]  # of parts of parameters that are tensor subclasses
    read: frozenset[int]  # of parameters that the graph computes with; only these may get a gradient
    whole: frozenset[int]  # of parameters whose module runs in this graph from its inputs to its outputs
    pre_backward_elsewhere: frozenset[int]  # of parameters whose pre-backward hook is behind a graph break
    left_unsharded: frozenset[int]  # of parameters that the graph leaves unsharded for its backward


@dataclass(frozen=True, eq=False, slots=True)
class CompiledForward:
    """A compiled forward graph that reads unsharded parameters.

    Only its inputs tell its parameter groups, because Dynamo runs one graph for several modules of a class if it
    compiles their forward as a separate frame.
    """

    # The graph, compiled by the inner backend. With lifted hooks, it takes the inputs that `step.hooks.split` returns.
    run: Callable[..., Sequence[Any]]
    parameters: ParameterInputs
    whole_of: weakref.ref[nn.Module] | None  # the called module if its whole forward is in the graph; else None
    step: Step


class GroupUse(NamedTuple):
    """A graph's use of one parameter group."""

    position: int  # of one of the group's parameters in the graph's inputs
    read: list[torch.Tensor]  # the group's parameters that the graph computes with


@dataclass(frozen=True, eq=False, slots=True)
class CallInputs:
    """Inputs of one run of a forward graph, without the activations among them."""

    groups: dict[TraceableGroup, GroupUse]
    managed: tuple[Any, ...]  # the inputs that are unsharded parameters
    differentiable: list[int]  # positions of the inputs that need a gradient and are no unsharded parameters
    # The unsharded parameters that need a gradient, if the graph is a pipeline stage's whole forward, because a
    # schedule may look for them behind the graph's node. Otherwise empty, because autograd would hold back gradients of
    # these parameters from eager code until the graph's backward is over.
    leaves: list[torch.Tensor]
    sizes: list[int]  # integer inputs: sizes that may change
    hooks: Any  # the object that gets the hooks on the graph's intermediates; None without hooks

    @classmethod
    def of(cls, forward: CompiledForward, args: Sequence[Any], hooks: Any) -> CallInputs:
        """Sort a graph's inputs `args`, which exclude the object that gets the hooks."""
        positions = forward.parameters.managed
        groups: dict[TraceableGroup, GroupUse] = {}
        for position in positions:
            if (group := owner_of(args[position])) is not None:
                use = groups.setdefault(group, GroupUse(position, []))
                if position in forward.parameters.read:
                    use.read.append(args[position])
        is_managed, is_stage = set(positions), _is_stage(forward)
        return cls(
            groups,
            managed=tuple(args[i] for i in positions),
            differentiable=[
                i
                for i, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and arg.requires_grad and i not in is_managed
            ],
            leaves=[args[i] for i in positions if is_stage and args[i].requires_grad],
            sizes=[arg for arg in args if type(arg) is int],
            hooks=hooks,
        )


def _is_stage(forward: CompiledForward) -> bool:
    """Return whether a pipeline schedule runs the graph as the whole forward of its stage."""
    outermost = calls.outermost()
    is_whole = forward.whole_of is not None and outermost is not None and forward.whole_of() is outermost.module
    return is_whole and runs_below(stage_forward_code(), threading.get_ident())


def runs_below(code: CodeType | None, thread: int) -> bool:
    """Return whether a function's frame is on a thread's stack; False for None, a function nobody has imported.

    Callers pass the thread of the forward, because a backward may run on a thread of the autograd engine.
    """
    frame = None if code is None else sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
