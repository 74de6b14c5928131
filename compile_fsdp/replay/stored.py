"""A traced step as plain data, for binding to a model's graphs."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CellType
from typing import Any

from torch import nn

from compile_fsdp.backend.agreement import note_agreed
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.compiled_forward import CompiledForward, ParameterInputs
from compile_fsdp.backend.costs import note_rows
from compile_fsdp.backend.graph_order import follow
from compile_fsdp.backend.memory_budget import note_decision
from compile_fsdp.backend.prefill import unshard_before_run
from compile_fsdp.backend.step import Step
from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks
from compile_fsdp.replay.backward import BackwardFrame, BackwardRecord, BackwardSignature
from compile_fsdp.replay.frames import Frame, FrameRecord, StoredFrame, pickle_graph
from compile_fsdp.runtime.group import TraceableGroup


@dataclass(frozen=True, slots=True)
class StoredBackward:
    frame: StoredFrame
    signature: BackwardSignature

    @classmethod
    def of(cls, record: BackwardRecord, with_graph: bool) -> StoredBackward:
        """Store a recorded backward; NotPortableError if it cannot be stored."""
        if record.problem is not None or record.frame is None or record.signature is None:
            raise NotPortableError(record.problem or "its backward was not traced")
        return cls(record.frame.finish(with_graph), record.signature)

    def bind(self, graph: Callable[..., Any]) -> BackwardFrame:
        return BackwardFrame(self.frame.bind(graph, None, frozenset({"inputs"})), self.signature)

    def load(self) -> BackwardFrame:
        run = self.frame.load()

        def run_list(inputs: list[Any], *others: Any) -> Any:
            flat = [*inputs, *others]
            inputs.clear()
            return run(flat)

        unfilled = self.frame.unfilled
        whole = unshard_before_run(run_list, unfilled) if unfilled else run_list
        return self.bind(follow(whole, self.frame.collectives, "backward graph"))


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A forward and its backwards, to which more are added as they are traced."""

    forward: StoredFrame
    parameters: ParameterInputs  # inputs of the forward that are unsharded parameters
    hooks: DeferredHooks | None  # lifted out of the forward's graph
    costs: Costs | None  # by which the forward was compiled, as in `Options.costs`
    decision: BudgetDecision | None  # how the step fits into its memory budget; None without a budget
    groups: tuple[str, ...]  # as in `Step`
    blocks: tuple[bytes, ...]  # each pickled; empty on ranks that write no bundle
    backwards: list[StoredBackward] = field(default_factory=list)

    @classmethod
    def of(cls, forward: FrameRecord, with_graph: bool) -> StoredStep:
        """Store a recorded forward, still without a backward; NotPortableError if it cannot be stored."""
        compiled: CompiledForward = forward.graph.forward
        step = compiled.step
        frame = forward.finish(with_graph)
        blocks = tuple(map(pickle_graph, step.blocks)) if with_graph else ()
        return cls(frame, compiled.parameters, step.hooks, step.options.costs, step.decision, step.groups, blocks)

    def frames(self) -> list[StoredFrame]:
        return [self.forward, *(each.frame for each in self.backwards)]

    def load(self, options: Options, module: nn.Module) -> ForwardGraph:
        """Return the graph of a module's whole forward, which knows the stored backwards.

        A different backward of this forward is traced, with the decisions by which the forward was compiled.
        """
        run_list = self.forward.load()

        def run(*inputs: Any) -> Any:
            return run_list(list(inputs))

        blocks = tuple(map(pickle.loads, self.blocks))
        step = Step(replace(options, costs=self.costs), self.decision, self.hooks, self.groups, blocks)
        followed = follow(run, self.forward.collectives, "forward graph")
        step.known += [each.load() for each in self.backwards]
        return ForwardGraph(CompiledForward(followed, self.parameters, weakref.ref(module), step))

    def note_agreed(self, options: Options, groups: Sequence[TraceableGroup]) -> None:
        """Note that all ranks start with this step; `groups` are all groups of its model.

        Otherwise a rank that traces alone later, for a different batch, would wait for its peers.
        """
        for frame in self.frames():
            note_agreed(frame.collectives)
        for first in (group for group in groups if group.constants.text in self.groups[:1]):
            if self.costs is not None:
                note_rows(first, self.groups, self.costs.rows)
            if self.decision is not None:
                note_decision(first, self.groups, options, self.decision)

    def bind(self, graph: ForwardGraph, closure: Sequence[CellType]) -> Frame:
        return self.forward.bind(graph, tuple(closure), frozenset({"args", "kwargs"}))
