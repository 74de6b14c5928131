"""The registered Dynamo backend `compile_fsdp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from compile_fsdp.backend.backward import BackwardCompiler
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.costs import settle_costs
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.group_figures import group_figures
from compile_fsdp.backend.inner import TracedGraph, compile_traced
from compile_fsdp.backend.memory_budget import budget_pass
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.ops import ensure_ops
from compile_fsdp.options import Options
from compile_fsdp.passes import pipelines
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision, fit_memory_budget
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks, lift_tensor_hooks
from compile_fsdp.passes.runner import Run
from compile_fsdp.replay.backward import GraphReplay
from compile_fsdp.replay.recording import current
from compile_fsdp.runtime import calls, trace_record
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.group_calls import GROUP_CALLS
from compile_fsdp.runtime.hooks import StateHooks
from compile_fsdp.runtime.tracing import restore_hook_bodies_now
from compile_fsdp.torch_compat.dynamo import copy_dynamo_graph, has_hooks_input
from compile_fsdp.torch_compat.required import check_names


def compile_fsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo has traced through sharded modules.

    Use it by name: `model.compile(backend="compile_fsdp", fullgraph=True)`.

    Args:
        gm: The forward graph.
        example_inputs: Its inputs.
        options: See `Options`.
        mode: A mode of Inductor, as for torch.compile.
    Returns:
        The compiled graph. Its backward runs under compiled autograd, with these options.
    Raises:
        UnknownOptionError: an option does not exist, or a bundle is asked for outside of model.compile().
        NotShardedError: the graph uses parameters, and none of a traceable model.
    """
    restore_hook_bodies_now()
    traced = trace_record.take()
    parsed = Options.parse(options, mode)
    _check_names_and_ops()
    if parsed.bundle is not None and traced.entered and not any(hooks.root.replay for hooks in traced.entered):
        raise UnknownOptionError(
            "expected model.compile() with a bundle, got torch.compile() of a model or a function; call the model's "
            'own, with backend="compile_fsdp" and options={"bundle": ...}'
        )
    costs = settle_costs(gm, GraphInputs(gm), parsed)
    if costs is not None:
        parsed = replace(parsed, costs=costs)
    gm, example_inputs, passes = _run_passes(gm, example_inputs, parsed)
    inputs = GraphInputs(gm)
    inputs.check_writes(gm.graph)
    groups = group_figures(inputs, passes.left_unsharded) if torch.is_grad_enabled() else ()
    graph = TracedGraph(gm, example_inputs, "forward", inputs, parsed, passes.decision, groups)
    read = graph.inputs.read_positions()
    compiled: Callable[..., Any] = compile_traced(graph)
    if graph.inputs.managed:
        compiled = _behind_boundary(graph, compiled, read, passes, traced)
    else:
        graph.inputs.check_sharded()
    if (frame := current()) is not None:
        frame.see_graph(compiled)
    return compiled


def _check_names_and_ops() -> None:
    check_names()
    ensure_ops()


@dataclass(frozen=True, slots=True)
class _PassResults:
    """Decisions of the passes on Dynamo's forward graph.

    Attributes:
        hooks: The hooks taken out of the graph; None for no hooks.
        left_unsharded: The groups that the forward leaves unsharded for its backward, by the user's memory budget.
        decision: How the step fits into its memory budget; None without a budget.
    """

    hooks: DeferredHooks | None
    left_unsharded: Collection[Hashable]
    decision: BudgetDecision | None = None


def _run_passes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> tuple[fx.GraphModule, Sequence[Any], _PassResults]:
    """Rewrite Dynamo's forward graph; return it, its remaining inputs, and the decisions."""
    takes_numbers = options.inner_backend in ("inductor", "aot_eager")  # their graphs go through AOTAutograd
    lifts_hooks = takes_numbers and bool(GraphInputs(gm).managed) and has_hooks_input(gm)
    if lifts_hooks:
        gm = copy_dynamo_graph(gm)  # Dynamo still reads the inputs of the original graph
    inputs, has_backward = GraphInputs(gm), torch.is_grad_enabled()
    fitted = budget_pass(inputs, options) if has_backward else None
    done = Run(
        gm.graph,
        pipelines.forward(
            GROUP_CALLS,
            lifts_hooks=lifts_hooks,
            fitted=fitted,
            frozen=inputs.frozen_nodes() if has_backward else (),
        ),
    )
    gm.recompile()
    hooks = done.result(lift_tensor_hooks) if lifts_hooks else None
    if hooks is not None:
        example_inputs, _ = hooks.split(example_inputs)
    if fitted is None:
        return gm, example_inputs, _PassResults(hooks, ())
    decision = done.result(fit_memory_budget)
    return gm, example_inputs, _PassResults(hooks, [inputs.groups[i] for i in decision.kept], decision)


def _behind_boundary(
    graph: TracedGraph,
    run: Callable[..., Any],
    read: frozenset[int],
    passes: _PassResults,
    traced: trace_record.TraceRecord,
) -> ForwardGraph:
    managed = graph.inputs.managed
    left, entered = _groups(traced.left), _groups(traced.entered)
    return ForwardGraph(
        run=run,
        managed=tuple(managed),
        parts=graph.inputs.part_positions(),
        read=read,
        whole=frozenset(i for i, group in managed.items() if group in entered and group in left),
        whole_of=_whole_module(traced),
        pre_backward_elsewhere=frozenset(i for i, group in managed.items() if group not in left),
        left_unsharded=frozenset(i for i, group in managed.items() if group in passes.left_unsharded),
        backward_prefetch=graph.options.backward_prefetch,
        hooks=passes.hooks,
        compile_backward=BackwardCompiler(graph.options, passes.hooks, passes.decision),
        replay=GraphReplay(),
    )


def _whole_module(traced: trace_record.TraceRecord) -> weakref.ref[nn.Module] | None:
    """Return the called module if the graph has its whole forward."""
    call = calls.outermost()
    if call is None or (hooks := module_hooks_of(call.module).hooks) not in traced.entered:
        return None
    return weakref.ref(call.module) if hooks in traced.left else None


def _groups(modules: Iterable[StateHooks]) -> set[TraceableGroup]:
    return {group for hooks in modules for group in hooks.groups}
