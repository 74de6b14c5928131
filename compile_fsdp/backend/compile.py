"""The registered Dynamo backend `compile_fsdp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from compile_fsdp.backend.blocks import BlockCompiler
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.capturable import check_device
from compile_fsdp.backend.compiled_forward import CompiledForward, ParameterInputs
from compile_fsdp.backend.costs import settle_costs
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.inner import TracedGraph, compile_traced
from compile_fsdp.backend.memory_budget import budget_pass
from compile_fsdp.backend.step import Step
from compile_fsdp.backend.this_run import this_run
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.ops import ensure_ops
from compile_fsdp.options import Options
from compile_fsdp.passes import pipelines
from compile_fsdp.passes.analysis.untraced_code import find_untraced_code, name_contexts
from compile_fsdp.passes.dynamo.fit_memory_budget import fit_memory_budget
from compile_fsdp.passes.dynamo.lift_tensor_hooks import lift_tensor_hooks
from compile_fsdp.passes.dynamo.outline_blocks import outline_blocks
from compile_fsdp.passes.runner import run_passes
from compile_fsdp.runtime import calls, trace_record
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.gather import free
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.root import StateHooks
from compile_fsdp.runtime.tracing import GROUP_CALLS, restore_hook_bodies_now
from compile_fsdp.torch_compat.dynamo import copy_dynamo_graph, explain_untraceable_hooks, has_hooks_input
from compile_fsdp.torch_compat.dynamo_limits import keep_list_items_constant
from compile_fsdp.torch_compat.inductor import generates_code
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
        options: See `Options`.
        mode: A mode of Inductor, as for torch.compile.
    Returns:
        The compiled graph. Its backward runs under compiled autograd, with these options.
    Raises:
        UnknownOptionError: an option does not exist, or a bundle is asked for outside of model.compile().
        NotShardedError: the graph uses parameters, and none of a traceable model.
    """
    restore_hook_bodies_now()
    keep_list_items_constant()
    traced = trace_record.take()
    parsed = Options.parse(options, mode)
    check_names()
    ensure_ops()
    _check_bundle(parsed, traced)
    step, graph = _decide(gm, example_inputs, parsed)
    parameters = _parameter_inputs(step, graph, traced)
    if graph.inputs.managed:
        graph.inputs.warn_of_unreduced()
    else:
        graph.inputs.check_sharded()
    compiled: Callable[..., Any] = compile_traced(graph)
    if graph.inputs.managed:
        compiled = ForwardGraph(CompiledForward(compiled, parameters, _whole_module(traced), step))
    if (frame := this_run().observer) is not None:
        frame.see_graph(compiled)
    return compiled


def _check_bundle(options: Options, traced: trace_record.TraceRecord) -> None:
    if options.bundle and traced.entered and not any(hooks.root.replay for hooks in traced.entered):
        raise UnknownOptionError(
            "expected model.compile() with a bundle, got torch.compile() of a model or a function; call the model's "
            'own, with backend="compile_fsdp" and options={"bundle": ...}'
        )


def _decide(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> tuple[Step, TracedGraph]:
    """Decide about the step and rewrite its forward graph accordingly."""
    is_aot = options.inner_backend in ("inductor", "aot_eager")  # their graphs go through AOTAutograd
    lifts_hooks = is_aot and has_hooks_input(gm) and bool(GraphInputs(gm).managed)
    if lifts_hooks:
        gm = copy_dynamo_graph(gm)  # Dynamo still reads the inputs of the original graph
    inputs, has_backward = GraphInputs(gm), torch.is_grad_enabled()
    if options.cuda_graphs and inputs.managed:
        check_device(inputs.groups[0].fsdp_group.device)
    if (costs := settle_costs(gm, inputs, options)) is not None:
        options = replace(options, costs=costs)
    options = _with_random_numbers(options, inputs)
    # Not inside `without_code`, because `compile-fsdp plan` counts the ops of each block.
    calls_blocks = is_aot and bool(inputs.managed) and generates_code()
    fitted = budget_pass(inputs, options, calls_blocks=calls_blocks) if has_backward else None
    frozen = inputs.frozen_nodes() if has_backward else ()
    untraced = find_untraced_code(gm)  # before `outline_blocks` moves ops out of the graph
    passes = pipelines.forward(GROUP_CALLS, free=free, lifts_hooks=lifts_hooks, fitted=fitted, frozen=frozen)
    done = run_passes(gm.graph, passes)
    decision = done.get(fit_memory_budget)
    compiler = BlockCompiler(options, has_backward)
    if calls_blocks and (decision is None or decision.calls_blocks):
        outline_blocks(gm.graph, compiler)
        _drop_unread_bodies(gm)
    name_contexts(gm)
    gm.recompile()
    hooks = done.get(lift_tensor_hooks)
    if hooks is not None:
        example_inputs, _ = hooks.split(example_inputs)
        inputs = GraphInputs(gm)  # one input less
    inputs.check_writes(gm)
    step = Step(options, decision, hooks, inputs.texts, tuple(compiler.blocks))
    groups = inputs.figures(step.left_unsharded(inputs.groups)) if has_backward else ()
    return step, TracedGraph(step, gm, example_inputs, "forward", inputs, untraced, groups)


def _drop_unread_bodies(gm: fx.GraphModule) -> None:
    """Remove the bodies of checkpoints that are in blocks, because keys of torch's caches would contain them."""
    read = {node.target for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in [name for name, body in gm.named_children() if isinstance(body, fx.GraphModule) and name not in read]:
        delattr(gm, name)


def _with_random_numbers(options: Options, inputs: GraphInputs) -> Options:
    """Let Inductor draw the numbers of eager PyTorch, to verify steps, and on CPUs, where it draws its own slowly."""
    if options.verify:
        return replace(options, inductor={**options.inductor, "fallback_random": True})
    if inputs.groups and inputs.groups[0].fsdp_group.device.type == "cpu":
        return replace(options, inductor={"fallback_random": True, **options.inductor})
    return options


def _parameter_inputs(step: Step, graph: TracedGraph, traced: trace_record.TraceRecord) -> ParameterInputs:
    managed, left, entered = graph.inputs.managed, _groups(traced.left), _groups(traced.entered)
    left_unsharded = step.left_unsharded(graph.inputs.groups)
    return ParameterInputs(
        managed=tuple(managed),
        parts=tuple(graph.inputs.parts),
        read=graph.inputs.read_positions(),  # before the compiler changes the graph
        whole=frozenset(i for i, group in managed.items() if group in entered and group in left),
        pre_backward_elsewhere=frozenset(i for i, group in managed.items() if group not in left),
        left_unsharded=frozenset(i for i, group in managed.items() if group in left_unsharded),
    )


def _whole_module(traced: trace_record.TraceRecord) -> weakref.ref[nn.Module] | None:
    """Return the called module if the graph has its whole forward."""
    call = calls.outermost()
    if call is None or (hooks := module_hooks_of(call.module).hooks) not in traced.entered:
        return None
    return weakref.ref(call.module) if hooks in traced.left else None


def _groups(modules: Iterable[StateHooks]) -> set[TraceableGroup]:
    return {group for hooks in modules for group in hooks.groups}


# torch.compile() imports this file when it looks up the backend's name, before it traces the model.
explain_untraceable_hooks(
    'the model is sharded with torch\'s own fully_shard, which Dynamo cannot trace; with backend="compile_fsdp", call '
    "compile_fsdp.make_traceable() on it first, or shard it with compile_fsdp.fully_shard()"
)
