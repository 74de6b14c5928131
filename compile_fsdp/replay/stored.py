"""A traced step as plain data, for binding to a model's graphs."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from types import CellType
from typing import Any, Literal

from torch import nn

from compile_fsdp.backend.backward import BackwardCompiler
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.graph_order import follow
from compile_fsdp.backend.prefill import UnshardBeforeRun
from compile_fsdp.errors import NotPortableError
from compile_fsdp.options import Options
from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.replay.backward import BackwardFrame, BackwardRecord, GraphReplay, Place
from compile_fsdp.replay.conditions import Conditions
from compile_fsdp.replay.frames import Frame
from compile_fsdp.replay.program import Program
from compile_fsdp.replay.recording import FrameRecord
from compile_fsdp.replay.sources import Sources
from compile_fsdp.reports import GraphReport, record
from compile_fsdp.torch_compat.inductor import load_graph


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """Stored form of a frame: of a forward or a backward.

    Attributes:
        conditions: Conditions under which its code is right.
        program: Its code.
        sources: Source files of its code.
        graph: The compiled graph, pickled; empty if the step stays in this process.
        reports: Reports of the passes on the graph.
        collectives: Collectives of the graph.
    """

    conditions: Conditions
    program: Program
    sources: Sources
    graph: bytes
    reports: tuple[GraphReport, ...]
    collectives: CollectiveSequence

    @classmethod
    def of(cls, frame: FrameRecord, with_graph: bool) -> StoredFrame:
        """Store a recorded frame.

        Raises:
            NotPortableError: the frame cannot be stored.
        """
        conditions, program, sources = frame.finish()
        graph = _pickle(frame.stored) if with_graph else b""
        return cls(conditions, program, sources, graph, tuple(frame.reports), frame.collectives)

    def load(self) -> Callable[[list[Any]], Any]:
        """Return the compiled graph, which takes and empties a list of inputs."""
        for report in self.reports:
            record(replace(report, cached=True))
        return load_graph(pickle.loads(self.graph))

    def bind(
        self, graph: Callable[..., Any], closure: tuple[CellType, ...] | None, inputs: frozenset[str]
    ) -> Frame:
        """Return the frame, with a compiled graph.

        Args:
            graph: The graph.
            closure: Closure of the traced frame; None without a closure.
            inputs: Names of arguments whose object changes every step.
        """
        variables = self.program.globals(graph)
        return Frame(self.program.bind(variables, closure), self.conditions, variables, inputs)


def _pickle(store: Callable[[], Any] | None) -> bytes:
    if store is None or (stored := store()) is None:
        raise NotPortableError("its graph cannot be stored")
    try:
        return pickle.dumps(stored)
    except Exception as error:  # pickled classes may raise any exception
        raise NotPortableError(f"its graph cannot be stored: {type(error).__name__}: {error}") from error


# Attributes of `ForwardGraph` that are plain data.
_PLAIN = ("managed", "parts", "read", "whole", "pre_backward_elsewhere", "left_unsharded", "backward_prefetch", "hooks")
assert set(_PLAIN) < {field.name for field in fields(ForwardGraph)}


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A forward and its backward.

    Attributes:
        forward: The forward.
        graph: Plain data of its `ForwardGraph`, by attribute name.
        backward: The backward.
        places: Places of the backward's inputs, see `replay.backward.Place`.
        outputs: Numbers of the outputs of the forward's node that have a gradient.
        accumulated: By leaf of the forward's autograd graph: whether it has a gradient before.
        undefined: Places of the leaves that get no gradient.
        unfilled: Positions of inputs of the backward whose groups are gathered before it runs.
        costs: Costs by which the forward was compiled, as in `Options.costs`.
        decision: How the step fits into its memory budget; None without a budget.
    """

    forward: StoredFrame
    graph: dict[str, Any]
    backward: StoredFrame
    places: tuple[Place, ...]
    outputs: tuple[int, ...]
    accumulated: tuple[bool, ...]
    undefined: tuple[Place, ...]
    unfilled: tuple[int, ...]
    costs: Costs | Literal["measured", "constants"] | None
    decision: BudgetDecision | None

    @classmethod
    def of(cls, forward: FrameRecord, backward: BackwardRecord, with_graphs: bool) -> StoredStep:
        """Store a recorded step.

        Args:
            forward: Record of its forward.
            backward: Record of its backward.
            with_graphs: Whether to pickle the compiled graphs, for a step that leaves this process.
        Raises:
            NotPortableError: the step cannot be stored.
        """
        if backward.problem is not None or backward.frame is None:
            raise NotPortableError(backward.problem or "its backward was not traced")
        compiler = forward.graph.compile_backward
        return cls(
            forward=StoredFrame.of(forward, with_graphs),
            graph={name: getattr(forward.graph, name) for name in _PLAIN},
            backward=StoredFrame.of(backward.frame, with_graphs),
            places=tuple(backward.places),
            outputs=tuple(backward.outputs),
            accumulated=tuple(backward.accumulated),
            undefined=tuple(backward.undefined),
            unfilled=tuple(backward.unfilled),
            costs=compiler.options.costs,
            decision=compiler.decision,
        )

    def load_forward(self, options: Options, module: nn.Module) -> ForwardGraph:
        """Return the graph of a module's whole forward, with its stored backward.

        A different backward of this forward is traced, with the decisions by which the forward was compiled.
        """
        run_list = self.forward.load()
        decided = replace(options, costs=self.costs)

        def run(*inputs: Any) -> Any:
            return run_list(list(inputs))

        graph = ForwardGraph(
            run=follow(run, self.forward.collectives, "forward graph"),
            whole_of=weakref.ref(module),
            compile_backward=BackwardCompiler(decided, self.graph["hooks"], self.decision),
            replay=GraphReplay(),
            **self.graph,
        )
        graph.replay.backward = self.bind_backward(self._load_backward())
        return graph

    def _load_backward(self) -> Callable[..., Any]:
        run = self.backward.load()

        def run_list(inputs: list[Any], *others: Any) -> Any:
            flat = [*inputs, *others]
            inputs.clear()
            return run(flat)

        whole = UnshardBeforeRun(run_list, self.unfilled) if self.unfilled else run_list
        return follow(whole, self.backward.collectives, "backward graph")

    def bind_forward(self, graph: ForwardGraph, closure: Sequence[CellType]) -> Frame:
        """Return the model's frame, with a forward graph."""
        return self.forward.bind(graph, tuple(closure), frozenset({"args", "kwargs"}))

    def bind_backward(self, graph: Callable[..., Any]) -> BackwardFrame:
        """Return the backward's frame, with a compiled graph."""
        frame = self.backward.bind(graph, None, frozenset({"inputs"}))
        return BackwardFrame(frame, self.places, self.outputs, self.accumulated, self.undefined)
