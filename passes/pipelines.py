"""Passes of each graph level, in running order; `runner.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.dynamo.call_tensor_hooks import call_tensor_hooks
from compile_fsdp.passes.dynamo.canonicalize_backward import canonicalize_backward
from compile_fsdp.passes.dynamo.drop_input_aliases import drop_input_aliases
from compile_fsdp.passes.dynamo.drop_undefined_gradients import drop_undefined_gradients
from compile_fsdp.passes.dynamo.expand_group_calls import expand_group_calls
from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs
from compile_fsdp.passes.dynamo.keep_module_hooks import keep_module_hooks
from compile_fsdp.passes.dynamo.legalize_windows import legalize_windows
from compile_fsdp.passes.dynamo.lift_tensor_hooks import lift_tensor_hooks
from compile_fsdp.passes.dynamo.open_checkpoints import open_checkpoints
from compile_fsdp.passes.dynamo.save_before_writes import save_before_writes
from compile_fsdp.passes.dynamo.save_frozen_outputs import save_frozen_outputs
from compile_fsdp.passes.post_grad.make_replayable import make_replayable
from compile_fsdp.passes.post_grad.pack_gathers import pack_gathers
from compile_fsdp.passes.post_grad.pack_reductions import pack_reductions
from compile_fsdp.passes.post_grad.packing import Merge
from compile_fsdp.passes.post_grad.read_by_strides import read_by_strides
from compile_fsdp.passes.post_grad.remove_unread import remove_unread
from compile_fsdp.passes.post_grad.remove_unshard_copies import remove_unshard_copies
from compile_fsdp.passes.post_grad.replace_unsafe_gathers import replace_unsafe_gathers
from compile_fsdp.passes.post_grad.schedule_collectives import schedule_collectives
from compile_fsdp.passes.report import Names, node_name
from compile_fsdp.passes.runner import Pass, PostGradPass, function_of

Function = Callable[..., Any]


def forward(
    functions: Collection[Function],
    *,
    free: Function,
    lifts_hooks: bool,
    fitted: Pass | None,
    frozen: Collection[fx.Node],
) -> tuple[Pass, ...]:
    """Return the passes for a forward that Dynamo has traced.

    `free`: the one of `functions` that frees parameters. `lifts_hooks`: whether the inner backend needs a graph without
    hooks. `fitted`: `fit_memory_budget` with its arguments, or None if the step has no budget. Last comes
    `outline_blocks`, which hides ops from all passes, unless the budget has decided against it.
    """
    return (
        # First, because it moves group calls.
        partial(open_checkpoints, functions=functions, free=free),
        # Next, because later passes match single ops.
        partial(expand_group_calls, functions=functions),
        keep_module_hooks,
        *((lift_tensor_hooks,) if lifts_hooks else ()),
        drop_input_aliases,
        # Before the budget, which asks the partitioner to recompute other ops only.
        save_before_writes,
        *((fitted,) if fitted is not None else ()),
        partial(save_frozen_outputs, frozen=frozen),
    )


def captured_backward(
    *, has_gradient: Sequence[bool], inputs: Sequence[Any], hooks: Sequence[str] | None
) -> tuple[Pass, ...]:
    """Return the passes for a captured backward, before Dynamo traces it.

    `hooks`: attributes of the lifted hooks by number, or None if none were lifted.
    """
    return (
        # First, because hooks that must not be called are still hook points in the graph.
        partial(drop_undefined_gradients, has_gradient=has_gradient, inputs=inputs),
        # Before runs are joined, because a run of ops ends at a hook call.
        *((partial(call_tensor_hooks, hooks=hooks),) if hooks is not None else ()),
        join_op_runs,
    )


def traced_backward(functions: Collection[Function], *, names: Names, fake_mode: Any) -> tuple[Pass, ...]:
    """Return the passes for a backward that Dynamo has traced."""
    return (
        # First, because later passes match single ops.
        partial(expand_group_calls, functions=functions),
        partial(legalize_windows, names=names),
        # Last, because it numbers nodes in their final order.
        partial(canonicalize_backward, fake_mode=fake_mode),
    )


def post_grad(
    names: Names, *, hoist: bool, merge: Merge = Merge.SMALL, costs: Costs | None, replayed: bool = False
) -> tuple[PostGradPass, ...]:
    """Return the passes for a forward or backward post-grad graph; `replayed`: whether a device graph will run it."""
    return (
        # First, because every read of a parameter depends on a mutation while a window copies into it, and no pass may
        # move such a read. Afterwards the graph is functional in these parameters.
        partial(remove_unshard_copies, names=names),
        # Next, because it matches the windows that are left.
        read_by_strides,
        *((make_replayable,) if replayed else ()),
        # Before packing and ordering, because these settle which collectives there are.
        remove_unread,
        replace_unsafe_gathers,
        partial(pack_gathers, merge=merge, costs=costs),
        partial(pack_reductions, merge=merge, costs=costs),
        # Last, because it places the collectives that packing leaves.
        partial(schedule_collectives, hoist=hoist, costs=costs),
    )


# The passes that the option `disabled_passes` can name.
PASSES = tuple(map(function_of, post_grad(node_name, hoist=True, costs=None)))
