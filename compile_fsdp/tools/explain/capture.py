"""Collect the graphs, graph breaks and recompiles inside a `with` block, with each graph before and after each pass."""

from __future__ import annotations

import itertools
import linecache
import logging
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from compile_fsdp.passes import PassCounts, WindowReport
from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.analysis.windows import resized_placeholders
from compile_fsdp.replay import bundle
from compile_fsdp.reports import Direction, GraphReport, observing, reports
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.tools.explain.events import Event, read_events, trace_parameters
from compile_fsdp.tools.explain.memory import count_windows
from compile_fsdp.tools.explain.names import GraphNames, GroupFacts, add_model, describe_group, name_graph
from compile_fsdp.tools.explain.text import format_node
from compile_fsdp.torch_compat.dynamo import current_compile_id, graph_break_logger, last_compilations
from compile_fsdp.torch_compat.fsdp import FSDPState
from compile_fsdp.torch_compat.inductor import graph_input_position

_BREAK = re.compile(r"in user code at (.+?):(\d+)\nGraph Break Reason: (.*)", re.DOTALL)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code; `source` is the line itself, empty if it cannot be read."""

    filename: str
    line: int
    source: str

    @classmethod
    def at(cls, filename: str, line: int) -> Place:
        return cls(filename, line, linecache.getline(filename, line).strip())


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which Dynamo breaks the forward into two graphs."""

    place: Place
    reason: str  # the construct that Dynamo could not trace
    explanation: str  # why the construct ends a graph, in Dynamo's words; may be empty
    hints: tuple[str, ...]  # advice on the graph break, in Dynamo's words


@dataclass(frozen=True, slots=True)
class Recompile:
    """A function that was compiled again."""

    place: Place  # of the call in the user's code; of the function's definition if the call is not known
    function: str  # its name; "the model" or "the backward" for code of compile_fsdp and of compiled autograd
    reason: str  # the guard that failed
    times: int = 1  # number of recompilations for this reason


@dataclass(frozen=True, slots=True)
class Stage:
    """A graph after one pass."""

    name: str  # of the pass; "traced" for the graph before the first pass
    summary: str  # report of the pass, in one line
    lines: tuple[str, ...]  # the graph as text, one line for each node


@dataclass(slots=True)
class CapturedGraph:
    """One graph on its way through the passes."""

    kind: str  # "forward", "backward", or "evaluation" for a forward without a backward
    groups: tuple[GroupFacts, ...]
    windows: Counter[str]  # fills of each unsharded parameter in the traced graph, by FQN
    windows_left: Counter[str]  # fills that stay after `remove_unshard_copies`, by FQN
    stages: list[Stage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    kept: tuple[tuple[str, str], ...] = ()  # (parameter FQN, reason) of the windows that the passes left
    model: str = ""  # of all the groups; empty without groups, and if the FQNs begin with the names of several models

    def add_model(self) -> None:
        """Put the model's name before all FQNs."""
        named = partial(add_model, self.model)
        self.groups = tuple(group.of_model(self.model) for group in self.groups)
        self.windows = Counter({named(fqn): number for fqn, number in self.windows.items()})
        self.windows_left = Counter({named(fqn): number for fqn, number in self.windows_left.items()})
        self.kept = tuple((named(fqn), reason) for fqn, reason in self.kept)
        for i, event in enumerate(self.events):
            parameters, gradients = (tuple(map(named, fqns)) for fqns in (event.parameters, event.gradients))
            self.events[i] = replace(event, name=named(event.name), parameters=parameters, gradients=gradients)


@dataclass(slots=True)
class _Watcher:
    """Observer of one graph. A second graph is the backward of a graph without sharded modules."""

    graphs: list[CapturedGraph]
    kind: str
    groups: tuple[GroupFacts, ...]
    names: GraphNames
    costs: Costs | None
    models: tuple[str, ...]  # of the groups
    is_second: bool = False

    def start(self, graph: fx.Graph) -> None:
        windows = count_windows(graph, self.names)
        kind = "backward" if self.is_second else self.kind
        model = self.models[0] if len(self.models) == 1 else ""
        self.graphs.append(CapturedGraph(kind, self.groups, windows, windows_left=windows, model=model))
        self.is_second = True
        self._add_stage("traced", f"{len(graph.nodes)} nodes", graph)

    def after(self, graph: fx.Graph, report: WindowReport | PassCounts) -> None:
        self._add_stage(report.name, str(report), graph)
        if isinstance(report, WindowReport):
            kept = [(fqn, reason.value) for fqn, reason in report.kept]
            self.graphs[-1].kept += tuple(self._add_models(kept, graph) if len(self.models) > 1 else kept)
            self.graphs[-1].windows_left = count_windows(graph, self.names)

    def end(self, graph: fx.Graph) -> None:
        latest = self.graphs[-1]
        latest.events = read_events(graph, self.names, self.costs, latest.kind == "backward")

    def _add_models(self, kept: Iterable[tuple[str, str]], graph: fx.Graph) -> Iterator[tuple[str, str]]:
        """Name the models of kept windows by the parameters that the graph still resizes; the passes name no model."""
        positions = map(graph_input_position, resized_placeholders(graph))
        resized = {self.names.unsharded.get(each) for each in positions if each is not None}
        for fqn, reason in dict.fromkeys(kept):
            found = [each for model in self.models if (each := add_model(model, fqn)) in resized]
            yield from ((each, reason) for each in found or [fqn])

    def _add_stage(self, name: str, summary: str, graph: fx.Graph) -> None:
        unsharded, sent = trace_parameters(graph, self.names)
        labels = {node: ", ".join(sorted(fqns)) for node, fqns in unsharded.items()}
        labels |= {node: f"shards of {', '.join(sorted(fqns))}" for node, fqns in sent.items()}
        lines = (format_node(node) + (f"  # {labels[node]}" if node in labels else "") for node in graph.nodes)
        self.graphs[-1].stages.append(Stage(name, summary, tuple(lines)))


class Capture:
    """The graphs, graph breaks and recompiles that `capture` has collected so far.

    Graphs are in the order of their compilation. Recompiles and reports are added at the end of the block; if graphs of
    several models were captured, FQNs then begin with the name of their model.
    """

    def __init__(self) -> None:
        # Graphs of all inner backends: the groups whose unsharded parameters are inputs of each graph.
        self.traced: dict[Direction, list[tuple[TraceableGroup, ...]]] = {"forward": [], "backward": []}
        self.graphs: list[CapturedGraph] = []  # graphs that Inductor compiles with the passes
        self.models: dict[FSDPState, str] = {}  # by state of the root, the model's class, with a number if it is taken
        self.breaks: list[GraphBreak] = []  # each place and reason once
        self.recompiles: list[Recompile] = []
        self.reports: list[GraphReport] = []
        self.notes: list[str] = []  # warnings of `compile_fsdp` itself, such as a backward that runs op by op
        self._reported = len(reports())
        self._callers: dict[str, Place] = {}  # by compile id
        self._start_us = int(time.time() * 1e6)

    def begin(
        self, direction: Direction, gm: fx.GraphModule, groups: Collection[TraceableGroup], costs: Costs | None
    ) -> _Watcher:
        stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())]
        caller = innermost_place(each for each in reversed(stack) if Path(each[0]).name != "contextlib.py")
        if caller is not None:
            self._callers[str(current_compile_id())] = caller
        self.traced[direction].append(tuple(groups))
        kind = direction if torch.is_grad_enabled() or direction == "backward" else "evaluation"
        models = {group: self._model_of(group) for group in groups}
        names = tuple(dict.fromkeys(models.values()))
        added = models if len(names) > 1 else dict.fromkeys(groups, "")
        facts = tuple(describe_group(group).of_model(model) for group, model in added.items())
        return _Watcher(self.graphs, kind, facts, name_graph(gm, added), costs, names)

    def _model_of(self, group: TraceableGroup) -> str:
        root = next((state for state in group.state._state_ctx.all_states if state._is_root), group.state)
        if root not in self.models:
            name = type(root._modules[0]).__name__.removeprefix("FSDP")
            numbered = (f"{name} {number}" for number in itertools.count(2))
            taken = self.models.values()
            self.models[root] = next(each for each in itertools.chain([name], numbered) if each not in taken)
        return self.models[root]

    def add_break(self, message: str) -> None:
        if (match := _BREAK.search(message)) is None:
            return
        text, _, stack = match[3].partition("\nUser code traceback:")
        # A break inside a library is at the user's line that called the library. A break in torch's optimizers keeps
        # its line, because the optimizers cause it themselves.
        is_called = match[1].startswith(_LIBRARIES) and not match[1].startswith(_OPTIMIZERS)
        place = (last_user_place(stack) if is_called else None) or Place.at(match[1], int(match[2]))
        found = GraphBreak(place, *split_reason(text))
        if found not in self.breaks:
            self.breaks.append(found)

    def finish(self) -> None:
        for graph in self.graphs if len(self.models) > 1 else ():
            graph.add_model()
        found: Counter[Recompile] = Counter()
        for each in last_compilations():
            if each.recompile_reason is not None and (each.start_time_us or 0) >= self._start_us:
                definition = Place.at(each.co_filename or "", each.co_firstlineno or 0)
                place = self._callers.get(str(each.compile_id), definition)
                function = "the model" if (each.co_name or "").startswith("_call_impl") else each.co_name or ""
                function = "the backward" if (each.co_filename or "").startswith("<eval_with_key>") else function
                found[Recompile(place, function, describe_guard(each.recompile_reason))] += 1
        self.recompiles += [replace(each, times=times) for each, times in found.items()]
        self.reports += reports()[self._reported :]


def describe_guard(reason: str) -> str:
    """Return Dynamo's first failed guard without ids and the line of code behind it."""
    return re.sub(r"^[!\d/]+: |, \d{9,}", "", reason.partition("\n")[0]).partition("  #")[0].strip()


def last_user_place(stack: str) -> Place | None:
    """The innermost line of a traceback's text outside torch and compile_fsdp; None if there is none."""
    return innermost_place((name, int(line)) for name, line in re.findall(r'File "(.+?)", line (\d+)', stack))


def innermost_place(lines: Iterable[tuple[str, int]]) -> Place | None:
    """The last of (filename, line number) outside torch and compile_fsdp; None if there is none."""
    return next((Place.at(*each) for each in reversed(list(lines)) if not is_library(each[0])), None)


def is_library(filename: str) -> bool:
    """Whether a file belongs to torch or compile_fsdp, or the code has no file."""
    return filename.startswith((*_LIBRARIES, "<"))


def split_reason(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Split Dynamo's message about a graph break into the construct, the explanation and the hints."""
    lines = [line.strip() for line in text.rpartition("Graph break encountered:")[2].splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Encountered graph break"):
        lines = lines[1:]  # the first line names a bytecode instruction, which differs in each frame around the break
    explanation = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    return lines[0] if lines else "", " ".join(explanation), tuple(hints)


@contextmanager
def capture() -> Iterator[Capture]:
    """Collect the compilations of all threads inside the block, whose models use no bundles."""
    captured = Capture()
    breaks, own = graph_break_logger, logging.getLogger("compile_fsdp")
    with (
        observing(captured.begin),
        bundle.kept_in(None),
        _listening(breaks, logging.DEBUG, captured.add_break),
        _listening(own, logging.WARNING, captured.notes.append),
    ):
        yield captured
    captured.finish()


@contextmanager
def _listening(logger: logging.Logger, level: int, receive: Callable[[str], None]) -> Iterator[None]:
    """Pass a logger's messages to `receive` inside the block; the logger's output stays unchanged."""
    handler = logging.Handler(level)
    handler.emit = lambda record: receive(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    if not logger.isEnabledFor(level):
        logger.setLevel(level)
        logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
