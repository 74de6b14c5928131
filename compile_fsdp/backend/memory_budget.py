"""The memory budget of a step, with one decision for all ranks.

[Note: One decision]
Ranks may have batches of different sizes. The rank that needs the most memory decides for all ranks, so the decision
fits on each of them. Ranks compare once for the groups of a graph. A rank that compiles alone later, for a different
batch size, reuses the agreed kept groups and packs, and calls equal blocks if its peers do, because no collective is
issued within a block. It decides alone only on recomputation and offloading, which do not affect its peers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from compile_fsdp.backend.agreement import share_largest
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.errors import MemoryBudgetError
from compile_fsdp.options import Options
from compile_fsdp.passes.budget.choose import Choice
from compile_fsdp.passes.budget.step_memory import Sharding
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision, fit_memory_budget
from compile_fsdp.passes.runner import Pass
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.torch_compat.dynamo import graph_input_example
from compile_fsdp.wrap.tree import ROOT

# Share of a device's free memory that "auto" leaves to kernel workspaces and the allocator's fragmentation.
RESERVE = 0.05

# Bytes of optimizer state per byte of sharded parameters. "auto" subtracts them, because the first step is compiled
# before AdamW allocates its two moments.
STATE_TO_COME = 2

_UNFIT = 2**60  # more than any step needs


@dataclass(eq=False, slots=True)
class Agreement:
    """Decisions of all ranks about a step."""

    decisions: dict[bool, BudgetDecision] = field(default_factory=dict)  # by whether a step has exceeded the budget
    lowered: int = 0  # bytes by which a step over the budget has exceeded its estimate, which keeps so many free
    is_measured: bool = False  # whether the peak of the first step has been compared with the budget

    @property
    def decision(self) -> BudgetDecision | None:
        return self.decisions.get(self.lowered > 0)

    def add(self, decision: BudgetDecision) -> None:
        self.decisions.setdefault(decision.lowered > 0, decision)


# By a graph's first group, then by budget and groups.
_agreed: WeakKeyDictionary[TraceableGroup, dict[Hashable, Agreement]] = WeakKeyDictionary()


def find_agreement(first: TraceableGroup, texts: tuple[str, ...], options: Options) -> Agreement | None:
    """Return the agreement about a graph, by its first group and the texts of its groups."""
    return _agreed.get(first, {}).get((options.memory_budget, texts))


def budget_pass(inputs: GraphInputs, options: Options, *, calls_blocks: bool) -> Pass | None:
    """Return the pass `fit_memory_budget` for a forward graph; None without a budget or sharded parameters.

    `calls_blocks`: whether equal blocks may become calls.

    Raises:
        MemoryBudgetError: the device does not report its free memory; or, on all ranks when the pass runs, the step
            does not fit.
    """
    groups = inputs.groups
    if options.memory_budget is None or not groups:
        return None
    device = groups[0].fsdp_group.device
    budget = options.memory_budget if options.memory_budget != "auto" else _free_bytes(device, groups)
    if (agreement := find_agreement(groups[0], inputs.texts, options)) is not None:
        budget = max(budget - agreement.lowered, 0)
    costs, fuses = options.costs, options.inner_backend == "inductor"
    assert costs is not None  # `settle_costs` has run
    numbers = {group: number for number, group in enumerate(groups)}
    return partial(
        fit_memory_budget,
        parameters={node: _sharding_of(node, group, numbers[group]) for node, group in inputs.managed_nodes()},
        ranks=max(group.constants.shard_count for group in groups),
        budget=budget,
        costs=costs if fuses else replace(costs, offload_bandwidth=0.0),  # only Inductor's partitioner offloads
        settle=partial(_settle, inputs=inputs, budget=budget, options=options),
        fuses=fuses,
        calls_blocks=calls_blocks,
    )


def _sharding_of(node: fx.Node, group: TraceableGroup, number: int) -> Sharding:
    tensor = graph_input_example(node)
    param, unshards = group.param_of(tensor), group.fsdp_group.unshard_in_backward
    name = group.fsdp_group._module_fqn or ROOT
    if param.unsharded_param is not tensor:
        return Sharding(number, 0, 0, unshards, name)  # a part of a tensor subclass, without a gradient
    reduced = (group.fsdp_group._reduce_dtype or tensor.dtype).itemsize
    return Sharding(number, _shard_bytes(param), tensor.numel() * reduced, unshards, name)


def _shard_bytes(param: TraceableParam) -> int:
    return param.layout.numel * param.fsdp_param.orig_dtype.itemsize


def _free_bytes(device: torch.device, groups: Sequence[TraceableGroup]) -> int:
    """Return the bytes that a step may allocate with `memory_budget="auto"`."""
    if device.type == "cpu":
        pages, ranks = os.sysconf("SC_AVPHYS_PAGES"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = pages * os.sysconf("SC_PAGE_SIZE") // ranks
    else:
        module = torch.get_device_module(device)
        try:
            cached = module.memory_reserved(device) - module.memory_allocated(device)
            free = module.mem_get_info(device)[0] + cached
        except AttributeError as error:
            raise MemoryBudgetError(
                f'expected a device that tells its free memory for memory_budget="auto", got {device.type}; give a '
                "number of bytes"
            ) from error
    sharded = sum(_shard_bytes(param) for group in groups for param in group.params)
    return max(int(free * (1 - RESERVE)) - STATE_TO_COME * sharded, 0)


def _settle(
    possible: Sequence[BudgetDecision], *, inputs: GraphInputs, budget: int, options: Options
) -> BudgetDecision:
    """Make the decision of all ranks, for this rank's possible ones. See [Note: One decision]."""
    key = options.memory_budget, inputs.texts
    agreement = _agreed.setdefault(inputs.groups[0], {}).setdefault(key, Agreement())
    possible = [replace(each, lowered=agreement.lowered) for each in possible]
    if agreement.decision is not None:
        return _with_collectives_of(agreement.decision, possible)
    own = possible[0]
    row = _need(possible), json.dumps(asdict(own))
    text = share_largest(inputs.process_groups(), "memory budget", row, options.agreement_timeout_s)
    decision = _parse(json.loads(text))
    if not (decision.fits or agreement.lowered):  # an estimate that a step has raised must not end the training
        raise MemoryBudgetError(
            f"expected a memory_budget of at least {decision.peak_bytes} bytes, which the step of this model and batch "
            f"needs with all that can be gathered and computed again, got {budget}; raise it, or make the batch smaller"
        )
    agreement.add(decision)
    return decision if decision.ops == own.ops else _with_collectives_of(decision, possible)


def _need(possible: Sequence[BudgetDecision]) -> int:
    """Return how far the fastest step without calls of blocks exceeds the budget, whatever this rank prefers."""
    (plain,) = (each for each in possible if not each.calls_blocks)
    return plain.fastest_bytes - plain.budget + (0 if possible[0].fits else _UNFIT)


def note_decision(first: TraceableGroup, texts: tuple[str, ...], options: Options, decision: BudgetDecision) -> None:
    """Note the decision for a graph that no rank traces, as `note_rows` does with rows."""
    _agreed.setdefault(first, {}).setdefault((options.memory_budget, texts), Agreement()).add(decision)


def _with_collectives_of(agreed: BudgetDecision, possible: Sequence[BudgetDecision]) -> BudgetDecision:
    own = next((each for each in possible if each.calls_blocks is agreed.calls_blocks), possible[0])
    choices = [each for each in agreed.choices if each.op < 0] + [each for each in own.choices if each.op >= 0]
    return replace(own, kept=agreed.kept, has_large_packs=agreed.has_large_packs, choices=tuple(choices))


def _parse(row: dict[str, Any]) -> BudgetDecision:
    choices = tuple(Choice(**each) for each in row["choices"])
    positions = {name: tuple(row[name]) for name in ("kept", "recomputed", "offloaded")}
    return BudgetDecision(**{**row, **positions, "choices": choices})
