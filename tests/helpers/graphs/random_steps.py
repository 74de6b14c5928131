"""Random post-grad graphs that gather, fill, read, free and reduce parameter groups.

The order is random, and may be one that no runtime produces. An action that would read memory which is freed, not
filled or not yet received is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes.analysis.collectives import CAST
from helpers.graphs.build import GATHER, GraphBuilder, aten, c10d, gather, name_collectives, reduce

RANKS = 2

# Kinds of actions, by subject.
_WITH_PARAMETERS = (
    "window", "gather", "gather_item", "fill_all", "fill", "free", "read", "read_value", "read_old_value", "view",
    "read_view", "write_shard", "write_row_of_shard", "write_value", "write_weight", "empty",
)  # fmt: skip
_WITH_GRADIENTS = (
    "gradients", "reduce", "reduce_anew", "accumulate", "write_gradient", "write_reduced", "write_input",
    "all_reduce", "gather_activations",
)  # fmt: skip
_SUBJECTS = (_WITH_PARAMETERS, _WITH_GRADIENTS, _WITH_PARAMETERS + _WITH_GRADIENTS)

Action = tuple[str, int, int]  # kind, index of the group, index of an item of the group


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A parameter group."""

    numels: tuple[int, ...]  # elements of each parameter's shard
    dtype: torch.dtype  # of unsharded parameters, all-gathers and reduce-scatters
    process_group: str  # its name


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of a graph."""

    groups: tuple[GroupPlan, ...]
    actions: tuple[Action, ...]
    is_named: bool = False  # whether the collectives are the runtime's, with names, or torch's


_group_plans = st.builds(
    GroupPlan,
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    st.sampled_from(["dp", "dp", "other"]),
)


@st.composite
def _actions(draw: st.DrawFn) -> tuple[Action, ...]:
    """Draw many actions of few kinds, so that kinds which fail together meet."""
    actions = draw(st.sampled_from(_SUBJECTS))
    kinds = draw(st.lists(st.sampled_from(actions), min_size=2, max_size=6, unique=True))
    action = st.tuples(st.sampled_from(kinds), st.integers(0, 2), st.integers(0, 3))
    return tuple(draw(st.lists(action, min_size=2, max_size=14)))


step_plans = st.builds(StepPlan, st.lists(_group_plans, min_size=1, max_size=3).map(tuple), _actions(), st.booleans())


@dataclass
class _Parameter:
    """A parameter [RANKS, numel] that starts freed, its shard [numel], and its storage's state."""

    shard: fx.Node
    weight: fx.Node
    saved: fx.Node  # [rows, numel], from which the gradient is computed
    is_full: bool = False
    is_filled: bool = False
    view: fx.Node | None = None


@dataclass
class _Group:
    plan: GroupPlan
    parameters: list[_Parameter]
    values: list[fx.Node] = field(default_factory=list)  # of the last gather
    old_values: list[fx.Node] = field(default_factory=list)
    gradients: list[fx.Node] = field(default_factory=list)
    reduced: list[list[fx.Node]] = field(default_factory=list)


class RandomStep:
    """A graph built from a plan; `rows`: number of rows of the rank's batch."""

    def __init__(self, plan: StepPlan, rows: int = 3) -> None:
        self._build = GraphBuilder()
        self._results: list[fx.Node] = []
        self._x = self._build.input("x", (rows, RANKS))
        self._groups = [
            _Group(group, [self._input(f"{i}_{j}", numel, rows, group.dtype) for j, numel in enumerate(group.numels)])
            for i, group in enumerate(plan.groups)
        ]
        for action, number, index in plan.actions:
            self._act(action, self._groups[number % len(self._groups)], index)
        self._results += [each for group in self._groups for reduced in group.reduced for each in reduced]
        self.graph = self._build.graph  # without a module, because creating a module takes longer than a run
        self.graph.output(tuple(dict.fromkeys(self._results)))
        if plan.is_named:
            name_collectives(self.graph)

    def inputs(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the rank's inputs, whole numbers with exact sums and products."""
        generator = torch.Generator().manual_seed(rank)
        given = {}
        for node in self.graph.find_nodes(op="placeholder"):
            value = self._build.value(node)
            given[node.name] = torch.randint(-2, 3, value.shape, generator=generator).to(value.dtype)
        for parameter in self._parameters():
            given[parameter.weight.name].untyped_storage().resize_(0)
        return given

    def defined(self) -> list[str]:
        """Names of the inputs whose data is defined when the graph returns."""
        weights = {parameter.weight.name: parameter.is_filled for parameter in self._parameters()}
        return [node.name for node in self.graph.find_nodes(op="placeholder") if weights.get(node.name, True)]

    def _parameters(self) -> list[_Parameter]:
        return [parameter for group in self._groups for parameter in group.parameters]

    def _input(self, name: str, numel: int, rows: int, dtype: torch.dtype) -> _Parameter:
        build = self._build
        shard = build.input(f"shard{name}", (numel,))
        return _Parameter(shard, build.input(f"w{name}", (RANKS, numel), dtype), build.input(f"h{name}", (rows, numel)))

    def _act(self, action: str, group: _Group, index: int) -> None:
        parameter = group.parameters[index % len(group.parameters)]
        item = index % len(group.values) if group.values else None
        match action:
            case "window":
                self._gather(group)
                for i, each in enumerate(group.parameters):
                    self._fill(each, group.values[i])
                for each in group.parameters[: index + 1]:
                    self._read(each.weight)
                for each in group.parameters[: 4 - index]:
                    self._free(each)
            case "gather":
                self._gather(group)
            case "gather_item":  # a single parameter, not packed
                shards = self._cast([parameter.shard], group)
                self._read(gather(self._build, shards, RANKS, group.plan.process_group)[0])
            case "fill" if group.values:
                self._fill(parameter, group.values[group.parameters.index(parameter)])
            case "free" if parameter.is_full:
                self._free(parameter)
            case "fill_all" if group.values:
                for each, value in zip(group.parameters, group.values, strict=True):
                    self._fill(each, value)
            case "read_old_value" if group.old_values:
                self._read(group.old_values[index % len(group.old_values)])
            case "read_value" if item is not None:
                self._read(group.values[item])
            case "write_value" if item is not None:
                self._write(group.values[item])
            case "gradients" | "reduce" | "reduce_anew" | "accumulate" | "write_gradient" | "write_reduced":
                self._act_on_gradients(action, group, index)
            case "write_input":
                self._write(parameter.saved if index else self._x)
            case "write_shard":
                self._write(parameter.shard)
            case "write_row_of_shard":
                self._write(self._build.call(aten.slice.Tensor, parameter.shard, 0, 0, 1))
            case "all_reduce" | "gather_activations":
                self._communicate(action, index)
            case "empty" if item is not None:
                value = group.values[item]
                self._build.call(aten.new_empty_strided.default, value, [2, 2], [2, 1])
            case _ if parameter.is_filled:
                self._act_on_weight(action, parameter)

    def _act_on_weight(self, action: str, parameter: _Parameter) -> None:
        if action == "read":
            self._read(parameter.weight)
        elif action == "view":
            parameter.view = self._build.call(aten.t.default, parameter.weight)
        elif action == "read_view" and parameter.view is not None:
            self._results.append(self._build.call(aten.mul.Tensor, parameter.view, 3))
        elif action == "write_weight":
            self._write(parameter.weight)

    def _act_on_gradients(self, action: str, group: _Group, index: int) -> None:
        build = self._build
        if action in ("gradients", "reduce_anew"):
            transposed = build.call(aten.permute.default, self._x, [1, 0])
            group.gradients = [build.call(aten.mm.default, transposed, each.saved) for each in group.parameters]
        if action in ("reduce", "reduce_anew") and group.gradients:
            group.reduced.append(self._reduce(group))
        elif action == "accumulate" and len(group.reduced) > 1:
            pairs = zip(group.reduced.pop(), group.reduced.pop(), strict=True)
            group.reduced.append([build.call(aten.add.Tensor, *pair) for pair in pairs])
        elif action == "write_gradient" and group.gradients:
            self._write(group.gradients[index % len(group.gradients)])
        elif action == "write_reduced" and group.reduced:
            self._write(group.reduced[-1][index % len(group.reduced[-1])])

    def _gather(self, group: _Group) -> None:
        shards = self._cast([parameter.shard for parameter in group.parameters], group)
        group.old_values = group.values
        group.values = gather(self._build, shards, RANKS, group.plan.process_group)

    def _cast(self, tensors: list[fx.Node], group: _Group) -> list[fx.Node]:
        dtype = group.plan.dtype
        return tensors if dtype == torch.float32 else [self._build.call(CAST, each, dtype) for each in tensors]

    def _reduce(self, group: _Group) -> list[fx.Node]:
        gradients = self._cast(group.gradients, group)
        return reduce(self._build, gradients, RANKS, group.plan.process_group)

    def _read(self, value: fx.Node) -> None:
        build = self._build
        if build.value(value).dtype != torch.float32:
            value = build.call(CAST, value, torch.float32)
        self._results.append(build.call(aten.mm.default, self._x, value))

    def _write(self, tensor: fx.Node) -> None:
        self._build.call(aten.add_.Tensor, tensor, 1)

    def _fill(self, parameter: _Parameter, value: fx.Node) -> None:
        # A second resize to the full size would keep the data; see test_remove_unshard_copies_random.py.
        if not parameter.is_full:
            self._build.full(parameter.weight)
        self._build.copy(parameter.weight, value)
        parameter.is_full = parameter.is_filled = True

    def _free(self, parameter: _Parameter) -> None:
        self._build.free(parameter.weight)
        parameter.is_full = parameter.is_filled = False

    def _communicate(self, action: str, index: int) -> None:
        build = self._build
        total = build.call(aten.sum.dim_IntList, self._x, [0])
        if action == "all_reduce":
            launched = build.call(c10d.all_reduce.default, total, "sum", "tp")
        else:
            launched = build.call(GATHER, total, RANKS, "tp")
        received = build.call(c10d.wait_tensor.default, launched)
        if index:  # Otherwise no node reads the result of the user's collective.
            self._results.append(build.call(aten.mul.Tensor, received, 2))
