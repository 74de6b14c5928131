"""A traced frame: recorded while Dynamo and the backend compile it, stored, and ready to be replayed."""

from __future__ import annotations

import dis
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any

from compile_fsdp.backend.step import CompiledGraph
from compile_fsdp.errors import NotPortableError
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.replay.conditions import Conditions, Watch
from compile_fsdp.replay.paths import Scope
from compile_fsdp.replay.program import Program
from compile_fsdp.replay.sources import Sources
from compile_fsdp.reports import GraphReport, record
from compile_fsdp.torch_compat.dynamo import GuardFact, guard_facts, traced_code
from compile_fsdp.torch_compat.global_state import GlobalState
from compile_fsdp.torch_compat.inductor import load_graph

_MOST_FAILURES = 8


class FrameRecord:
    """Record of one frame, as its `FrameObserver`."""

    def __init__(self, code: CodeType, scope: Scope, dropped: Callable[[GuardFact], bool]) -> None:
        """Take the frame's code and variables, and a test for guards that a replay satisfies by construction."""
        self.code = code
        self.scope: Scope | None = scope  # None once the guards are seen
        self.dropped = dropped
        self.graphs = 0  # number of graphs compiled for the frame
        self.graph: Any = None  # the compiled graph that the backend returns to Dynamo
        self.compiled: CompiledGraph | None = None
        self.sources = Sources()
        self.problem: str | None = None  # why the frame cannot be replayed; None if it can
        self._has_self = "self" in scope["L"]
        self._variables = scope["G"]
        self._state = GlobalState()  # before the trace, because Dynamo changes it
        self._conditions: Conditions | None = None
        self._new_code: CodeType | None = None

    def see_compiled(self, graph: CompiledGraph) -> None:
        self.compiled = graph
        self.sources.may_read_rank |= not graph.are_ranks_equal
        self.sources.has_dtensors |= graph.has_dtensors

    def see_graph(self, graph: Any) -> None:
        self.graphs += 1
        self.graph = graph
        assert self.compiled is not None
        self.sources.add([*traced_code(), *self.compiled.untraced.ops])

    def see_guards(self, entries: Sequence[Any]) -> None:
        facts = [fact for fact in guard_facts(entries) if not self.dropped(fact)]
        scope, self.scope = self.scope, None
        if scope is None:
            return  # guards of a second frame: there is more than one graph
        try:
            contexts = () if self.compiled is None else self.compiled.untraced.contexts
            self._conditions = Conditions(facts, scope, self._state, contexts)
        except Exception as error:  # the graph is right even if its record fails
            self.problem = str(error)

    def see_code(self, old: CodeType, new: CodeType) -> None:
        if old is self.code:
            self._new_code = new

    def finish(self, with_graph: bool) -> StoredFrame:
        """Return the frame for a replay; NotPortableError if it cannot be replayed, or its graph cannot be stored."""
        if self.problem is not None:
            raise NotPortableError(self.problem)
        if self._conditions is None or self._new_code is None or self.graphs != 1:
            raise NotPortableError(f"it was compiled as {self.graphs} graphs")
        if (problem := self.sources.problem) is not None:
            raise NotPortableError(problem)
        if not self._has_self and any(each.argval == "self" for each in dis.get_instructions(self._new_code)):
            raise NotPortableError("it reads a constant that is an attribute of its graph")
        names = (key[1] for kind, _, key in self._conditions.paths.accesses if kind == "root" and key[0] == "G")
        program, compiled = Program.record(self._new_code, self._variables, names), self.compiled
        assert compiled is not None
        graph = pickle_graph(compiled.stored and compiled.stored()) if with_graph else b""
        reports, unfilled = tuple(compiled.reports), tuple(compiled.unfilled)
        return StoredFrame(self._conditions, program, self.sources, graph, reports, compiled.collectives, unfilled)


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """Stored form of a frame, of a forward or a backward, with its compiled graph."""

    conditions: Conditions
    program: Program
    sources: Sources
    graph: bytes  # pickled; empty on ranks that write no bundle
    reports: tuple[GraphReport, ...]
    collectives: CollectiveSequence
    unfilled: tuple[int, ...]  # positions of inputs whose groups are gathered before it runs

    def load(self) -> Callable[[list[Any]], Any]:
        """Return the compiled graph, which takes and empties a list of inputs."""
        for report in self.reports:
            record(replace(report, cached=True))
        return load_graph(pickle.loads(self.graph))

    def bind(self, graph: Callable[..., Any], closure: tuple[CellType, ...] | None, inputs: frozenset[str]) -> Frame:
        """Return the frame, with a compiled graph and the closure of the traced frame; `inputs` as in `Frame`."""
        return Frame(self.program.bind(graph, closure), self.conditions, inputs)


def pickle_graph(graph: object) -> bytes:
    """Pickle a compiled graph's storable form or a block; NotPortableError if it cannot be stored, as for None."""
    if graph is None:
        raise NotPortableError("its graph cannot be stored")
    try:
        return pickle.dumps(graph)
    except Exception as error:  # pickled classes may raise any exception
        raise NotPortableError(f"its graph cannot be stored: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class Frame:
    """The compiled code of a frame, with conditions for running it."""

    run: FunctionType  # of the frame's arguments
    conditions: Conditions
    inputs: frozenset[str]  # names of arguments whose object changes every step
    problem: str | None = None  # why the code could not run at the last check of all conditions; None if it could
    runs: int = 0
    _watch: Watch | None = None
    _failures: int = 0

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the code may run now with these arguments."""
        scope: Scope = {"L": arguments, "G": self.run.__globals__}
        if self._watch is not None and self._watch.holds(scope):
            return True
        if self._failures >= _MOST_FAILURES:
            return False  # until the objects seen last return
        self.problem = self.conditions.problem(scope)
        if self.problem is not None:
            self._failures += 1
            return False
        self._failures = 0
        self._watch = Watch(self.conditions, scope, self.inputs, self._watch)
        return True

    def release(self) -> None:
        """Hold no object of the last call."""
        self._watch = None
