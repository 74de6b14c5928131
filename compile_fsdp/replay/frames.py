"""A traced frame: recorded while Dynamo and the backend compile it, and ready to be replayed."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from compile_fsdp.backend.step import CompiledGraph
from compile_fsdp.errors import NotPortableError
from compile_fsdp.replay.conditions import Conditions, Watch
from compile_fsdp.replay.paths import Scope
from compile_fsdp.replay.program import Program
from compile_fsdp.replay.sources import Sources
from compile_fsdp.torch_compat.dynamo import GuardFact, guard_facts
from compile_fsdp.torch_compat.global_state import GlobalState

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
        self.sources.add_traced_code()

    def see_guards(self, entries: Sequence[Any]) -> None:
        facts = [fact for fact in guard_facts(entries) if not self.dropped(fact)]
        scope, self.scope = self.scope, None
        if scope is None:
            return  # guards of a second frame: there is more than one graph
        try:
            self._conditions = Conditions(facts, scope, self._state)
        except Exception as error:  # the graph is right even if its record fails
            self.problem = str(error)

    def see_code(self, old: CodeType, new: CodeType) -> None:
        if old is self.code:
            self._new_code = new

    def finish(self) -> tuple[Conditions, Program, CompiledGraph]:
        """Return the parts that a replay of the frame needs; NotPortableError if it cannot be replayed."""
        if self.problem is not None:
            raise NotPortableError(self.problem)
        if self._conditions is None or self._new_code is None or self.graphs != 1:
            raise NotPortableError(f"it was compiled as {self.graphs} graphs")
        if (problem := self.sources.problem) is not None:
            raise NotPortableError(problem)
        if not self._has_self and any(each.argval == "self" for each in dis.get_instructions(self._new_code)):
            raise NotPortableError("it reads a constant that is an attribute of its graph")
        names = (key[1] for kind, _, key in self._conditions.paths.accesses if kind == "root" and key[0] == "G")
        assert self.compiled is not None
        return self._conditions, Program.record(self._new_code, self._variables, names), self.compiled


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
