"""Compile one traced graph, agree on its collectives, and verify it if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from compile_fsdp.advice import GroupFigures
from compile_fsdp.backend.agreement import agree
from compile_fsdp.backend.capturable import allocate_kept
from compile_fsdp.backend.cpu_probe import await_cpu_probe
from compile_fsdp.backend.derived_backward import DERIVED_BACKWARD, ForwardCompiler, Partitioner
from compile_fsdp.backend.device_graphs import compile_replayed
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.graph_order import follow
from compile_fsdp.backend.prefill import unshard_before_run
from compile_fsdp.backend.progress import Phase
from compile_fsdp.backend.recorder import Recorder
from compile_fsdp.backend.step import CompiledGraph, Step
from compile_fsdp.backend.this_run import this_run
from compile_fsdp.backend.verify import VerifiedGraph, VerifiedStep, is_repeatable
from compile_fsdp.ops import accumulate_gradient, ensure_lowerings, run_block, watch
from compile_fsdp.passes import GraphObserver, Pipeline, pipelines
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.graph_text import graph_text
from compile_fsdp.passes.analysis.sequence import read_collectives
from compile_fsdp.passes.analysis.untraced_code import UntracedCode
from compile_fsdp.passes.cache_key import cache_key, hash_file
from compile_fsdp.passes.partitioned.lift_views import lift_views
from compile_fsdp.passes.post_grad.packing import Merge
from compile_fsdp.reports import Direction, GraphReport, present_observer
from compile_fsdp.runtime.calls import outermost
from compile_fsdp.runtime.run_compiler import run_compiler
from compile_fsdp.torch_compat.dynamo import copy_dynamo_graph, has_hooks_input, lookup_backend
from compile_fsdp.torch_compat.inductor import (
    CACHEABLE_FUNCTIONS,
    compile_flat,
    compile_op_by_op,
    functorch_config,
    generates_code,
    inductor_compilers,
    is_whole,
    min_cut_partition,
    stored_graph,
)


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A graph that Dynamo has traced, after the passes on Dynamo's level."""

    step: Step
    gm: fx.GraphModule  # `compile_traced` lets the compiler change it
    example_inputs: Sequence[Any]
    direction: Direction
    inputs: GraphInputs
    untraced: UntracedCode  # empty for a backward graph
    groups: tuple[GroupFigures, ...] = ()  # of a forward graph's parameter groups; empty for a backward graph

    @property
    def what(self) -> str:
        """The graph's name in errors and messages."""
        return f"{self.direction} graph"


def compile_traced(graph: TracedGraph, unfilled: Sequence[int] = ()) -> Callable[..., Any]:
    """Compile a graph and compare its collectives across ranks, with the errors of `agree`.

    `unfilled` are positions of its inputs whose groups are gathered before it runs.
    """
    traced = read_collectives(graph.gm.graph)
    text, nodes = graph_text(graph.gm, traced.groups), len(graph.gm.graph.nodes)
    has_dtensors = any(isinstance(fake_value(node), DTensor) for node in graph.gm.graph.nodes)
    direction, options = graph.direction, graph.step.options
    is_compared = options.verify and bool(graph.inputs.managed)
    original = copy_dynamo_graph(graph.gm) if is_compared and is_repeatable(graph.gm.graph) else None
    decision = graph.step.decision if direction == "forward" else None
    unchanged = GraphReport(
        direction, options.inner_backend, 0, 0, 0, (), nodes, nodes, 0.0, False, decision, options.costs, graph.groups
    )
    recorder = Recorder(unchanged)
    # Here too, because torch.compile(model) traces the forward from above the model's own call.
    compiled, stored = run_compiler(partial(_call_inner_backend, graph, recorder))
    collectives = recorder.finish() or traced
    if options.cuda_graphs:
        compiled = allocate_kept(compiled, graph.inputs, recorder.reports)
    if unfilled:
        collectives = collectives.after(graph.inputs.gathers(unfilled))
    limit_s = options.agreement_timeout_s
    agreement = agree(collectives, text, graph.what, limit_s, options.progress)
    if (frame := this_run().observer) is not None:
        frame.see_compiled(
            CompiledGraph(
                stored, recorder.reports, collectives, unfilled, agreement.are_equal, has_dtensors, graph.untraced
            )
        )
    if is_compared and agreement.are_all_here:
        if direction == "forward" and torch.is_grad_enabled() and (call := outermost()) is not None:
            VerifiedStep(call, collectives, limit_s)
        if original is not None:
            compiled = VerifiedGraph(compiled, original, graph.what, collectives, limit_s)
    if unfilled:
        compiled = unshard_before_run(compiled, unfilled)
    return follow(compiled, collectives, graph.what)


def _partition_op_by_op(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_partition(*args, **kwargs)
    if lift_views(forward.graph):
        forward.recompile()
    return forward, backward


def _call_inner_backend(graph: TracedGraph, recorder: Recorder) -> tuple[Callable[..., Any], Callable[[], Any] | None]:
    """Return the compiled graph, and a function that makes it storable or None."""
    gm, options = graph.gm, graph.step.options
    observer = None
    if (watching := present_observer()) is not None:
        observer = watching(graph.direction, gm, graph.inputs.groups, options.costs)
    settings = dict(DERIVED_BACKWARD)
    # Hooks that stay in the graph keep it out of the caches, and become inputs of the backward that Inductor cannot
    # take.
    is_captured = graph.direction == "forward" and bool(graph.inputs.managed) and not has_hooks_input(gm)
    if options.inner_backend == "inductor" and is_captured:
        # Compile the backward at once, because AOTAutograd stores a graph only with both compiled halves.
        settings["force_non_lazy_backward_lowering"] = True
    if options.cuda_graphs:
        settings["enable_autograd_cache"] = False  # it would store graphs without their captures
    if this_run().observer is not None:  # it may store the graph
        settings["bundled_autograd_cache"] = True
    phase = Phase(f"compiling the {graph.what}, {len(gm.graph.nodes)} nodes,", options.progress)
    with phase, functorch_config.patch(settings):
        if options.inner_backend == "aot_eager":
            return compile_op_by_op(gm, graph.example_inputs, _partition_op_by_op), None
        if options.inner_backend != "inductor":
            return lookup_backend(options.inner_backend)(gm, list(graph.example_inputs)), None
        config = _inductor_config(graph, recorder, observer, is_captured)
        compile_fx, compile_inner = inductor_compilers()
        await_cpu_probe()
        if options.cuda_graphs and generates_code():
            compile_inner = partial(compile_replayed, compile_inner, graph.inputs, graph.what)
        if is_captured:
            compile_inner = ForwardCompiler(compile_inner)
        compile_graph = partial(compile_fx, inner_compile=compile_inner, config_patches=config)
        if any(isinstance(each, list) for each in graph.example_inputs):
            compiled, flat = compile_flat(gm, list(graph.example_inputs), compile_graph)
        else:
            compiled = flat = compile_graph(gm, list(graph.example_inputs))
        return compiled, None if options.cuda_graphs else stored_graph(flat)


def _inductor_config(
    graph: TracedGraph, recorder: Recorder, observer: GraphObserver | None, is_captured: bool
) -> dict[str, Any]:
    """Return Inductor's options: the user's, with additions that run the passes.

    `is_captured` tells whether the graph's backward, if any, runs under compiled autograd only.
    """
    ensure_lowerings()
    options, decision, is_forward = graph.step.options, graph.step.decision, graph.direction == "forward"
    config = dict(options.inductor)
    config.setdefault("reorder_for_peak_memory", False)  # see [Note: Who keeps the order]
    if observer is not None or options.verify:
        # No pass runs on a graph from Inductor's cache; AOTAutograd's cache follows this setting. Compiled C++ and
        # Triton may come from a cache, because `force_disable_caches` compiles all of it again, and leaves a new folder
        # for each graph.
        config |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    merge = Merge.SMALL
    if decision is not None:
        merge = Merge.ALL if decision.has_large_packs else Merge.NONE
    costs, replayed = options.costs, options.cuda_graphs
    passes = pipelines.post_grad(graph.inputs.name, hoist=is_forward, merge=merge, costs=costs, replayed=replayed)
    config["post_grad_custom_pre_pass"] = Pipeline(
        passes, recorder, options.disabled_passes, observer=observer, check=options.verify, applies=is_whole
    )
    ours = {f"{each.__module__}.{each.__name__}": cache_key() for each in (watch, accumulate_gradient, run_block)}
    config[CACHEABLE_FUNCTIONS] = {**config.get(CACHEABLE_FUNCTIONS, {}), **ours}
    if is_forward and (is_captured or decision is not None):
        decided = (decision.recomputed, decision.offloaded) if decision is not None else ()
        files = sorted({code.co_filename for code in graph.untraced.ops})
        config["custom_partitioner_fn"] = Partitioner(
            config.get("custom_partitioner_fn"), (*decided, *map(hash_file, files))
        )
    return config
