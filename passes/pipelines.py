"""The passes on each level of graph, in the order in which they run; `runner.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.dynamo.call_tensor_hooks import call_tensor_hooks
from compile_fsdp.passes.dynamo.canonicalize_backward import canonicalize_backward
from compile_fsdp.passes.dynamo.drop_undefined_gradients import drop_undefined_gradients
from compile_fsdp.passes.dynamo.expand_group_calls import expand_group_calls
from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs
from compile_fsdp.passes.dynamo.legalize_windows import legalize_windows
from compile_fsdp.passes.dynamo.lift_tensor_hooks import lift_tensor_hooks
from compile_fsdp.passes.dynamo.save_frozen_outputs import save_frozen_outputs
from compile_fsdp.passes.post_grad.pack_gathers import pack_gathers
from compile_fsdp.passes.post_grad.pack_reductions import pack_reductions
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
    lifts_hooks: bool,
    fitted: Pass | None,
    frozen: Collection[fx.Node],
) -> tuple[Pass, ...]:
    """A forward, as Dynamo has traced it.

    `lifts_hooks`: whether the inner backend is to get a graph without hooks. `fitted`: `fit_memory_budget` with its
    arguments, if there is a memory budget.
    """
    return (
        # First: the others know single ops.
        partial(expand_group_calls, functions=functions),
        *((lift_tensor_hooks,) if lifts_hooks else ()),
        *((fitted,) if fitted is not None else ()),
        partial(save_frozen_outputs, frozen=frozen),
    )


def captured_backward(
    *, has_gradient: Sequence[bool], inputs: Sequence[Any], hooks: Sequence[str] | None
) -> tuple[Pass, ...]:
    """A backward, as compiled autograd has captured it, before Dynamo traces it. `hooks`: None if none were lifted."""
    return (
        # First: hooks that are not to be called are points in the graph still.
        partial(drop_undefined_gradients, has_gradient=has_gradient, inputs=inputs),
        # Then: a run of ops ends where a hook is called.
        *((partial(call_tensor_hooks, hooks=hooks),) if hooks is not None else ()),
        join_op_runs,
    )


def traced_backward(functions: Collection[Function], *, names: Names, fake_mode: Any) -> tuple[Pass, ...]:
    """The same backward, as Dynamo has traced it."""
    return (
        # First: the others know single ops.
        partial(expand_group_calls, functions=functions),
        partial(legalize_windows, names=names),
        # Last: nodes are numbered in their final order.
        partial(canonicalize_backward, fake_mode=fake_mode),
    )


def post_grad(names: Names, *, hoist: bool, merge: bool, costs: Costs | None) -> tuple[PostGradPass, ...]:
    """A forward or a backward, as Inductor's post-grad passes get it."""
    return (
        # First: while parameters are copied into, every read of one depends on a mutation, and no other pass may
        # move it; afterwards the graph is functional in them.
        partial(remove_unshard_copies, names=names),
        # What it has left is read at its place.
        read_by_strides,
        # Then which collectives there are, before they are packed and ordered.
        remove_unread,
        replace_unsafe_gathers,
        partial(pack_gathers, merge=merge, costs=costs),
        partial(pack_reductions, merge=merge, costs=costs),
        # Last: it places what the others leave.
        partial(schedule_collectives, hoist=hoist, costs=costs),
    )


# The passes that the option `disabled_passes` can name.
PASSES = tuple(map(function_of, post_grad(node_name, hoist=True, merge=False, costs=None)))
