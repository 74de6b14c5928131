"""Random sequences of resizes, fills, reads, views and mutations: the pass keeps results and storage sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.execution import freed, run, storage_sizes
from helpers.graphs.fuzzing import MANY, fuzz
from helpers.graphs.render import render

PARAMETERS = 2
FULL_BYTES = 16  # of a (2, 2) f32 parameter

Action = tuple[str, int, int]  # kind, index of a parameter, index of a value or view
Actions = list[Action]

READS = ("read", "view", "read_view")
FAULTS = (
    "full", "tiny", "free", "copy", "mutate", "mutate_view", "mutate_value", "new_value", "alias_value",
    "chain", "strided",
)  # fmt: skip


@st.composite
def sequences(draw: st.DrawFn) -> Actions:
    """Windows on both parameters, which may overlap; some windows have a fault."""
    pending: list[Actions] = []
    for which in range(PARAMETERS):
        actions: Actions = []
        for _ in range(draw(st.integers(1, 3))):
            reads = draw(st.lists(st.sampled_from(READS), max_size=3))
            window = ["full", "copy", *reads, "free"]
            if draw(st.booleans()):
                window.insert(draw(st.integers(0, len(window))), draw(st.sampled_from(FAULTS)))
            actions += [(what, which, draw(st.integers(0, 3))) for what in window]
        pending.append(actions)
    merged: Actions = []
    while any(pending):
        actions = draw(st.sampled_from([actions for actions in pending if actions]))
        count = draw(st.integers(1, 8))
        merged += actions[:count]
        del actions[:count]
    return merged


@dataclass
class Parameter:
    """State of a parameter's storage, so that no read of undefined data is built."""

    node: fx.Node
    size_bytes: int
    is_defined: bool
    views: list[fx.Node] = field(default_factory=list)
    is_used: bool = False

    @property
    def is_readable(self) -> bool:
        return self.is_defined and self.size_bytes == FULL_BYTES


class RandomGraph:
    """A graph that runs: actions that would read freed or uninitialized memory are skipped."""

    def __init__(self, arrives_filled: list[bool]) -> None:
        self.build = GraphBuilder()
        self.parameters = [
            Parameter(self.build.input(f"p{i}", (2, 2)), FULL_BYTES * filled, filled)
            for i, filled in enumerate(arrives_filled)
        ]
        self.values = [self.build.input("v0", (2, 2)), self.build.input("v1", (2, 2))]
        self.results: list[fx.Node] = []

    def act(self, what: str, which: int, index: int) -> None:
        build, parameter = self.build, self.parameters[which]
        value = self.values[index % len(self.values)]
        view = parameter.views[index % len(parameter.views)] if parameter.views else None
        match what:
            case "new_value":
                self.values.append(build.call(aten.add.Tensor, value, index))
            case "alias_value":
                self.values.append(build.call(aten.view.default, value, [2, 2]))
            case "mutate_value":
                build.call(aten.mul_.Tensor, value, 3)
            case "full" | "free" | "tiny":
                self.resize(parameter, {"full": FULL_BYTES, "free": 0, "tiny": 8}[what])
            case "copy" if parameter.size_bytes == FULL_BYTES:
                self.fill(parameter, value)
            case "chain" if parameter.size_bytes == FULL_BYTES:
                other = self.parameters[(which + 1) % PARAMETERS]
                if other.is_readable:
                    self.fill(parameter, other.node)
                    other.is_used = True
            case "view" if parameter.is_readable:
                parameter.views.append(build.call(aten.t.default, parameter.node))
                parameter.is_used = True
            case "mutate_view" | "read_view" if view is None:
                pass
            case _ if parameter.is_readable:
                self.use(what, parameter, view)

    def resize(self, parameter: Parameter, size_bytes: int) -> None:
        if parameter.size_bytes and size_bytes and not parameter.is_used:
            return  # See [Note: A window starts freed]
        self.build.resize(parameter.node, size_bytes)
        parameter.is_defined &= size_bytes >= parameter.size_bytes
        parameter.size_bytes = size_bytes
        parameter.is_used = True

    def fill(self, parameter: Parameter, value: fx.Node) -> None:
        self.build.copy(parameter.node, value)
        parameter.is_defined = parameter.is_used = True

    def use(self, what: str, parameter: Parameter, view: fx.Node | None) -> None:
        """Write or read the parameter, or a view of it; `view` is not None if `what` needs it."""
        parameter.is_used = True
        call = self.build.call
        if what == "read":
            self.results.append(call(aten.mul.Tensor, parameter.node, 5))
        elif what == "strided":
            strided = call(aten.as_strided.default, parameter.node, [2], [2])
            self.results.append(call(aten.neg.default, strided))
        elif what == "mutate":
            call(aten.add_.Tensor, parameter.node, 7)
        elif what == "mutate_view":
            call(aten.add_.Tensor, view, 1)
        else:
            self.results.append(call(aten.mul.Tensor, view, 2))

    def finish(self) -> fx.Graph:
        return self.build.output(*self.results, *(parameter.node for parameter in self.parameters))


def random_graph(arrives_filled: list[bool], given_actions: Actions) -> tuple[fx.Graph, list[str]]:
    """The graph, and the inputs whose data is defined when the graph returns."""
    random = RandomGraph(arrives_filled)
    for action in given_actions:
        random.act(*action)
    defined = [parameter.node.name for parameter in random.parameters if parameter.is_readable]
    return random.finish(), ["v0", "v1", *defined]


def outcome(
    graph: fx.Graph, arrives_filled: list[bool], defined: list[str]
) -> tuple[list[torch.Tensor], dict[str, int]]:
    inputs = {"v0": torch.arange(4.0).view(2, 2), "v1": torch.full((2, 2), 11.0)}
    for i, filled in enumerate(arrives_filled):
        inputs[f"p{i}"] = torch.full((2, 2), 100.0 + i) if filled else freed(2, 2)
    results = run(graph, inputs)
    return results + [inputs[name] for name in defined], storage_sizes(inputs)


def check_sequence(arrives_filled: list[bool], given_actions: Actions) -> None:
    graph, defined = random_graph(arrives_filled, given_actions)
    before = outcome(graph, arrives_filled, defined)
    report = remove_unshard_copies(graph)
    graph.lint()
    after = outcome(graph, arrives_filled, defined)
    assert before[1] == after[1]
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    text = render(graph)
    again = remove_unshard_copies(graph)
    assert (again.windows_removed, render(graph)) == (0, text)
    assert report.nodes_before - report.nodes_after == 3 * report.windows_removed


@MANY
def test_results_and_storage_sizes_do_not_change(examples: int) -> None:
    arrive_filled = st.lists(st.booleans(), min_size=PARAMETERS, max_size=PARAMETERS)
    fuzz(check_sequence, examples, arrive_filled, sequences())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, PARAMETERS - 1), st.integers(0, 3)), max_size=6))
def test_every_legal_window_is_removed(windows: list[tuple[int, int]]) -> None:
    legal: Actions = []
    for which, reads in windows:
        legal += [("new_value", 0, which), ("full", which, 0), ("copy", which, reads)]
        legal += [("read", which, 0)] * reads + [("free", which, 0)]
    arrives_filled = [False] * PARAMETERS
    graph, defined = random_graph(arrives_filled, legal)
    before = outcome(graph, arrives_filled, defined)
    report = remove_unshard_copies(graph)
    assert (report.windows_removed, report.kept) == (len(windows), ())
    torch.testing.assert_close(before[0], outcome(graph, arrives_filled, defined)[0], rtol=0, atol=0)
