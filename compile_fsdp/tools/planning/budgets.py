"""What a compiled step needs, and what a memory budget would decide, for any number of ranks and before anything runs.

The forward is traced once, by Dynamo, as a rank of a world whose collectives do nothing; nothing is computed. What
depends on the number of ranks are the sizes of shards and the padding, which are put in afterwards.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.memory_budget import shardings
from compile_fsdp.errors import EstimateError
from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Parameter, Step
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.passes.dynamo.expand_group_calls import expand_group_calls
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision, decide
from compile_fsdp.runtime import trace_record
from compile_fsdp.runtime.group_calls import GROUP_CALLS
from compile_fsdp.runtime.tracing import restore_hook_bodies_now
from compile_fsdp.tools.launch import fake_world
from compile_fsdp.tools.planning.tracing import DEVICE, Batch
from compile_fsdp.torch_compat.dispatch import tree_map_only
from compile_fsdp.torch_compat.dynamo import graph_input_example
from compile_fsdp.wrap import Plan, apply


class _Traced(Exception):
    """The graph is there, and its step is not to run."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the sizes of one parameter follow from.

    Attributes:
        parameter: As the step has it.
        rows: Size of dim 0.
        row: Elements of a row.
        itemsizes: Of the shard and of the unsharded parameter.
    """

    parameter: Parameter
    rows: int
    row: int
    itemsizes: tuple[int, int]


class CompiledStep:
    """The forward of a model under FSDP2, and what its backward needs.

    Args:
        plan: Of a model on the meta device. The model is sharded, and serves for nothing else afterwards.
        batch: Keyword arguments of one forward, of which shapes and dtypes count.
        ranks: Of the world in which it is traced: the largest that is asked for, since its shards are allocated.
        fuses: Whether pointwise ops are compiled together with what reads them, as Inductor does.
    Raises:
        EstimateError: the forward is not one graph, or a parameter is not sharded along dim 0.
    """

    def __init__(self, plan: Plan, batch: Batch, ranks: int, *, fuses: bool = True) -> None:
        self._fuses = fuses
        self._shapes: list[_Shape] = []
        steps: list[Step] = []

        def trace(gm: fx.GraphModule, example_inputs: Any) -> Any:
            restore_hook_bodies_now()
            trace_record.take()
            steps.append(self._read(gm))
            return _stop

        torch.compiler.reset()  # what was compiled before does not count towards the recompile limit
        with fake_world(ranks):
            model = apply(plan).to_empty(device=DEVICE)
            run = torch.compile(model, backend=trace, fullgraph=True)
            with contextlib.suppress(_Traced):
                run(**tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device=DEVICE), dict(batch)))
        if not steps:
            raise EstimateError("expected a model whose forward can be traced, got none; try compile-fsdp explain")
        self._step = steps[0]

    def _read(self, gm: fx.GraphModule) -> Step:
        expand_group_calls(gm.graph, functions=GROUP_CALLS)
        inputs = GraphInputs(gm)
        parameters = shardings(inputs)
        step = read_step(gm.graph, parameters, fuses=self._fuses)
        found = {id(each.sharding): each for group in step.groups for each in group.parameters}
        for node, group in inputs.managed_nodes():
            if (parameter := found.get(id(parameters[node]))) is None:
                continue  # nothing reads it
            tensor = graph_input_example(node)
            sharded = group.param_of(tensor).fsdp_param
            if sharded.fsdp_placement.dim != 0 or parameter.sharding.shard_bytes == 0:
                raise EstimateError(f"expected parameters sharded along dim 0, got {group.fqn(tensor)} along another")
            rows = tensor.shape[0]
            itemsizes = sharded.orig_dtype.itemsize, tensor.itemsize
            self._shapes.append(_Shape(parameter, rows, tensor.numel() // rows, itemsizes))
        return step

    def at(self, ranks: int, costs: Costs) -> Timeline:
        """The step on one of so many ranks."""
        for each in self._shapes:
            shard, unsharded = (math.ceil(each.rows / ranks) * each.row * size for size in each.itemsizes)
            each.parameter.sharding = replace(each.parameter.sharding, shard_bytes=shard)
            each.parameter.size = unsharded * ranks
        return Timeline(self._step, ranks, costs)

    def decide(self, ranks: int, budget: int, costs: Costs) -> BudgetDecision:
        """What a budget of so many bytes above the sharded state would decide on so many ranks."""
        return decide(self.at(ranks, costs), budget)


def _stop(*args: Any) -> Any:
    raise _Traced
