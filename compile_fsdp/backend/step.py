"""Decisions about a forward graph and its backward, and observers of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge

from compile_fsdp.ops.call_block import Block
from compile_fsdp.options import Options
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.passes.analysis.untraced_code import UntracedCode
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks
from compile_fsdp.reports import GraphReport
from compile_fsdp.runtime.group import TraceableGroup


class CompiledGraph(NamedTuple):
    """A graph that the inner backend has compiled, as a `FrameObserver` sees it."""

    stored: Callable[[], Any] | None  # returns the graph in a storable form; None without such a form
    reports: Sequence[GraphReport]
    collectives: CollectiveSequence
    unfilled: Sequence[int]  # positions of inputs whose groups are gathered before it runs
    are_ranks_equal: bool  # whether no peer has a different graph
    # A graph with DTensors may depend on the rank although the peers have equal graphs, because AOTAutograd replaces
    # them by this rank's ops.
    has_dtensors: bool
    untraced: UntracedCode


class FrameObserver(Protocol):
    """Observer of one frame while Dynamo and the backend compile it."""

    def see_compiled(self, graph: CompiledGraph) -> None:
        """See a graph that the inner backend has compiled."""

    def see_graph(self, graph: Callable[..., Any]) -> None:
        """See the compiled graph that the backend returns to Dynamo."""

    def see_guards(self, entries: Sequence[Any]) -> None:
        """See Dynamo's guards of the graph."""

    def see_code(self, old: CodeType, new: CodeType) -> None:
        """See the code that Dynamo runs in place of a frame's code."""


class BackwardObserver(Protocol):
    """Observer of a backward of a forward graph."""

    def begin_backward(
        self, parameters: Sequence[torch.Tensor], outputs: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
    ) -> None:
        """See the unsharded parameters, the outputs' autograd edges and their gradients before the backward runs."""

    def begin_frame(
        self, function: FunctionType, arguments: Sequence[Any], undefined: Sequence[int]
    ) -> FrameObserver | None:
        """See the function that Dynamo will trace, its arguments and the positions of inputs without a gradient."""

    def end_backward(self) -> None:
        """See that the backward is over."""


# Runs a backward that was traced before if it is right for this forward, and returns whether it has run. It takes the
# unsharded parameters, autograd edges of outputs, their gradients, and the object with the forward's hooks.
KnownBackward = Callable[[Sequence[torch.Tensor], Sequence[GradientEdge], Sequence[torch.Tensor], Any], bool]


@dataclass(eq=False, slots=True)
class Step:
    """Decisions about a forward graph and its backwards, and these backwards."""

    options: Options  # the user's, with the costs by which the forward is compiled
    decision: BudgetDecision | None = None  # how the step fits into its memory budget; None without a budget
    hooks: DeferredHooks | None = None  # lifted out of the forward graph; None without hooks
    groups: tuple[str, ...] = ()  # texts of the constants of the forward's groups, in input order
    blocks: tuple[Block, ...] = ()  # what the graphs call by name, kept alive
    compiled: list[object] = field(default_factory=list)  # the captured backwards, which only this list keeps alive
    # Backwards that run without a capture, because they were traced before or read from a bundle.
    known: list[KnownBackward] = field(default_factory=list)
    observer: BackwardObserver | None = None  # of the next backward that is captured

    def left_unsharded(self, groups: Sequence[TraceableGroup]) -> list[TraceableGroup]:
        """Select from a forward graph's groups, in input order, those that the budget leaves unsharded."""
        return [] if self.decision is None else [groups[i] for i in self.decision.kept]
