"""The registered Dynamo backend `compile_fsdp`."""

from __future__ import annotations

import gc
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from compile_fsdp.agreement import agree
from compile_fsdp.boundary import ForwardGraph
from compile_fsdp.compat import (
    CACHEABLE_FUNCTIONS,
    FailOnRecompileLimitHit,
    Unsupported,
    compile_for_many,
    compile_graph,
    copy_dynamo_graph,
    fake_mode_of,
    graph_input_example,
    graph_input_position,
    has_hooks_input,
    release_real_tensors,
    restore_hook_bodies_now,
    without_side_effect_log,
    world_backend,
)
from compile_fsdp.deferred_hooks import DeferredHooks, call_hooks, take_hooks
from compile_fsdp.errors import NotRootError, NotShardedError, UnsupportedFeatureError
from compile_fsdp.op_runs import join_runs
from compile_fsdp.ops import accumulate_gradient, ensure_lowerings, ensure_ops, watch
from compile_fsdp.options import Options
from compile_fsdp.passes import Pipeline, expand_calls, keep_unsharded, legalize_windows, save_frozen_outputs
from compile_fsdp.passes.eager_effects import is_upkeep
from compile_fsdp.passes.sequence import CollectiveSequence, read_collectives
from compile_fsdp.passes.unfilled_reads import find_unfilled_reads
from compile_fsdp.pause import pause_collection
from compile_fsdp.progress import Phase
from compile_fsdp.recorder import Recorder
from compile_fsdp.reports import Direction, present_observer
from compile_fsdp.runtime import scope
from compile_fsdp.runtime.calls import outermost
from compile_fsdp.runtime.checks import describe
from compile_fsdp.runtime.group import TraceableGroup, owner_of
from compile_fsdp.runtime.group_calls import GROUP_CALLS
from compile_fsdp.runtime.hooks import StateHooks
from compile_fsdp.runtime.module import belongs_to_traceable
from compile_fsdp.stable_calls import stabilise_calls
from compile_fsdp.unfilled import FilledFirst, gather_inputs
from compile_fsdp.verify import VerifiedGraph, VerifiedStep, is_repeatable
from compile_fsdp.versions import check_names
from compile_fsdp.weakly import weakly

_log = logging.getLogger("compile_fsdp")


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
        mode: One of Inductor's modes, as torch.compile takes them.
    Returns:
        The compiled graph. Its backward runs under compiled autograd, with the same options.
    Raises:
        UnknownOptionError: an option does not exist.
        NotShardedError: the graph uses parameters, and none of a traceable model.
        NotRootError: several FSDP2 roots meet in the graph.
    """
    restore_hook_bodies_now()
    traced = scope.take()
    parsed = Options.parse(options, mode)
    check_names()
    ensure_ops()
    _check_roots(traced)
    expand_calls(gm.graph, GROUP_CALLS)
    gm.recompile()
    inputs = _GraphInputs(gm)
    if not inputs.managed:
        run = _compile(gm, example_inputs, parsed, "forward", inputs)
        inputs.check_sharded()
        return run
    gm, hooks = take_hooks(gm) if parsed.inner_backend == "inductor" else (gm, None)
    if hooks is not None:
        gm.recompile()
        inputs = _GraphInputs(gm)
        example_inputs, _ = hooks.split(example_inputs)
    read = inputs.read_positions()
    kept = _keep_unsharded(gm, parsed, inputs)
    if torch.is_grad_enabled():
        save_frozen_outputs(gm.graph, inputs.frozen_nodes())
    run = _compile(gm, example_inputs, parsed, "forward", inputs)
    left, entered = _groups(traced.left), _groups(traced.entered)
    return ForwardGraph(
        run=run,
        managed=tuple(inputs.managed),
        read=read,
        whole=frozenset(i for i, group in inputs.managed.items() if group in entered and group in left),
        open=frozenset(i for i, group in inputs.managed.items() if group not in left),
        kept=frozenset(i for i, group in inputs.managed.items() if group in kept),
        backward_prefetch=parsed.backward_prefetch,
        hooks=hooks,
        compile_backward=_BackwardCompiler(parsed, hooks),
    )


def _groups(modules: Iterable[StateHooks]) -> set[TraceableGroup]:
    return {group for hooks in modules for group in hooks.groups}


def _keep_unsharded(gm: fx.GraphModule, options: Options, inputs: _GraphInputs) -> Collection[Any]:
    """The groups that a forward leaves unsharded for its backward, by the user's memory budget."""
    if options.memory_budget is None or not torch.is_grad_enabled():
        return ()
    groups = {node: group for node, group in inputs.managed_nodes() if group.group.unshard_in_backward}
    ranks = max((group.shard_count for group in groups.values()), default=1)
    kept = keep_unsharded(gm.graph, groups, ranks, options.memory_budget, options.costs)
    gm.recompile()
    return kept


def _check_roots(traced: scope.TraceScope) -> None:
    roots = [hooks for hooks in traced.entered if hooks.state._is_root]
    if len(roots) > 1:
        raise NotRootError(
            "expected one FSDP2 root in a compiled graph, got "
            f"{[describe(hooks.module, hooks.state) for hooks in roots]}; call fully_shard() on the module that "
            "contains them, or compile each model on its own"
        )


class _GraphInputs:
    """The inputs of a Dynamo graph: which are unsharded parameters, and their names."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.managed: dict[int, TraceableGroup] = {}
        self._fqns: dict[int, str] = {}
        self._positions: dict[fx.Node, int] = {}
        self._parameters: list[nn.Parameter] = []
        flat: list[Any] = []
        for node in gm.graph.find_nodes(op="placeholder"):
            self._positions[node] = len(flat)
            example = graph_input_example(node)
            # Compiled autograd hands its tensors in as one list, which the inner compiler sees item by item.
            flat += example if isinstance(example, list) else [example]
        for position, example in enumerate(flat):
            group = owner_of(example)
            if group is not None:
                self.managed[position] = group
                self._fqns[position] = group.fqn(example)
            elif isinstance(example, nn.Parameter):
                self._parameters.append(example)

    def managed_nodes(self) -> list[tuple[fx.Node, TraceableGroup]]:
        """The placeholders that are unsharded parameters."""
        positions = self._positions.items()
        return [(node, self.managed[position]) for node, position in positions if position in self.managed]

    def frozen_nodes(self) -> list[fx.Node]:
        """Those that need no gradient."""
        return [node for node, _ in self.managed_nodes() if not graph_input_example(node).requires_grad]

    def read_positions(self) -> frozenset[int]:
        """Those of `managed` that something is computed with; the others are only filled and freed."""
        nodes = [node for node, _ in self.managed_nodes()]
        read = [node for node in nodes if not all(map(is_upkeep, node.users))]
        return frozenset(self._positions[node] for node in read)

    def unfilled_positions(self, graph: fx.Graph) -> list[int]:
        """Of the Dynamo graph itself, a backward: those of `managed` that it reads and never fills."""
        items = [user for node in self._positions for user in node.users if user.target is operator.getitem]
        managed = [node for node in (*self._positions, *items) if self._position(node) in self.managed]
        return [self._position(node) for node in find_unfilled_reads(graph, managed)]

    def gathers(self, positions: Iterable[int]) -> CollectiveSequence:
        """Those that fill some of `managed` outside of the graph."""
        groups = dict.fromkeys(self.managed[position] for position in positions)
        lines = [f"all-gather of {group.group._module_fqn or 'the root'}, unless it is unsharded" for group in groups]
        return CollectiveSequence(tuple(lines), tuple(group.gather_group for group in groups if group.gather_group))

    def name_before(self, node: fx.Node) -> str:
        """FQN of the parameter behind a placeholder, or an item of one, of the Dynamo graph itself."""
        return self._fqns.get(self._position(node), node.name)

    def _position(self, node: fx.Node) -> int:
        source, item = node.args if node.op == "call_function" else (node, 0)
        assert isinstance(source, fx.Node) and isinstance(item, int)
        return self._positions[source] + item

    def name(self, node: fx.Node) -> str:
        """FQN of the parameter behind a placeholder of the inner compiler's graph, else the node's name."""
        position = graph_input_position(node)
        return node.name if position is None else self._fqns.get(position, node.name)

    def check_sharded(self) -> None:
        foreign = [p for p in self._parameters if not belongs_to_traceable(p)]
        if foreign:
            raise NotShardedError(
                f"expected a sharded model, got a graph with {len(foreign)} parameters (first of shape "
                f"{tuple(foreign[0].shape)}) of a model that was never made traceable; shard it with "
                "compile_fsdp.fully_shard(), or call compile_fsdp.make_traceable() on one that is sharded"
            )


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    direction: Direction,
    inputs: _GraphInputs,
    before: CollectiveSequence | None = None,
) -> Callable[..., Any]:
    # Now, for the graph is the compiler's from here on.
    traced = read_collectives(gm.graph)
    original = copy_dynamo_graph(gm) if options.verify and inputs.managed and is_repeatable(gm.graph) else None
    recorder = Recorder(direction, options.inner_backend, len(gm.graph.nodes))
    config = dict(options.inductor)
    observer = None
    if (watching := present_observer()) is not None:
        observer = watching.begin(direction, gm, dict.fromkeys(inputs.managed.values()), options.costs)
    if options.inner_backend == "inductor":
        ensure_lowerings()
        config.setdefault("reorder_for_peak_memory", False)  # passes/schedule_collectives.py: who keeps the order
        if observer is not None or options.verify:
            config["force_disable_caches"] = True  # no pass runs on what comes from a cache
        if options.verify:
            config["fallback_random"] = True  # the traced graph's random numbers are torch's
        config["post_grad_custom_pre_pass"] = pipeline = Pipeline(
            inputs.name,
            recorder,
            options.disabled_passes,
            hoist=direction == "forward",
            merge=options.memory_budget is not None,
            costs=options.costs,
            observer=observer,
            check=options.verify,
            cpu_backend=world_backend("cpu"),
        )
        # They stand in ops/, which the pipeline's key covers.
        ours = {f"{each.__module__}.{each.__name__}": pipeline.uuid() for each in (watch, accumulate_gradient)}
        config[CACHEABLE_FUNCTIONS] = {**config.get(CACHEABLE_FUNCTIONS, {}), **ours}
    # Hooks that stay in the graph keep it out of the caches, and are inputs of a backward that Inductor cannot take.
    is_captured = direction == "forward" and bool(inputs.managed) and not has_hooks_input(gm)
    phase = Phase(f"compiling the {direction} graph, {len(gm.graph.nodes)} nodes,", options.progress)
    try:
        compiled = compile_graph(gm, example_inputs, options.inner_backend, config, is_captured)
    finally:
        phase.end()
    collectives = recorder.finish() or traced
    if before is not None:
        collectives = collectives.after(before)
    what, limit_s = f"{direction} graph", options.agreement_timeout_s
    are_all_here = agree(collectives, what, limit_s, options.progress)
    if not (options.verify and inputs.managed and are_all_here):
        return compiled
    if direction == "forward" and torch.is_grad_enabled() and (call := outermost()) is not None:
        VerifiedStep(call, collectives, limit_s)
    return compiled if original is None else VerifiedGraph(compiled, original, what, collectives, limit_s)


class _BackwardCompiler:
    """Compiles what compiled autograd captures, as one graph; where that fails, runs it op by op.

    Compiled autograd's cache keeps what it is given as long as the process lives, and so does torch.compile with
    a backend. Both get functions that only refer to this object: it belongs to the compiled forward graph, which Dynamo
    drops with the model.

    Attributes:
        state: The object with the hooks of the forward whose backward runs now.
    """

    def __init__(self, options: Options, hooks: DeferredHooks | None) -> None:
        self.options = options
        self.hooks = hooks
        self.state: Any = None
        self._runs: list[Callable[..., Any]] = []
        self._op_runs: set[Callable[..., Any]] = set()
        self._fake_modes: list[Any] = []  # of graphs that were compiled since the last run
        self._tracing: Phase | None = None  # from the first run until Dynamo has traced it

    def __call__(self, captured: fx.GraphModule) -> Callable[..., Any]:
        if self.hooks is not None:
            call_hooks(captured, self.hooks)
        self._op_runs |= join_runs(captured)
        captured.recompile()
        # Not the module itself: its handling of an exception would be compiled too, and fail with another one.
        # And a copy, since what Dynamo keeps with code and globals would live as long as the captured graph.
        forward = FunctionType(captured.forward.__code__.replace(), dict(captured.forward.__globals__))
        compiled = compile_for_many(MethodType(forward, captured), weakly(self._backend))
        is_traced = False

        def run(inputs: list[Any], *rest: Any) -> Any:
            nonlocal is_traced
            if self.hooks is not None:
                rest = (*rest, self.state)
            is_new, is_traced = not is_traced, True
            if is_new:
                self._tracing = Phase("tracing the backward", self.options.progress)
            is_paused = is_new and pause_collection()
            try:
                with without_side_effect_log() if is_new else nullcontext():
                    return compiled(inputs, *rest)
            except (Unsupported, FailOnRecompileLimitHit) as error:
                if not inputs:
                    raise  # The compiled graph has emptied the list: it has run, and failed.
                _log.warning("backward falls back to eager, op by op, with all its parameters unsharded: %s", error)
                gather_inputs(inputs)
                return captured(inputs, *rest)
            finally:
                if is_paused:
                    gc.enable()
                self._end_tracing()
                while self._fake_modes:
                    release_real_tensors(self._fake_modes.pop())

        self._runs.append(run)
        # Where AOTAutograd does not make every graph unique, a model may come upon the graph of one that is gone.
        return weakly(run, otherwise=captured)

    def _end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.end()
            self._tracing = None

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._end_tracing()
        if (fake_mode := fake_mode_of(gm)) is not None:
            self._fake_modes.append(fake_mode)
        expand_calls(gm.graph, GROUP_CALLS | self._op_runs)
        inputs = _GraphInputs(gm)
        unmoved = legalize_windows(gm.graph, inputs.name_before).unmoved
        if unmoved:
            raise UnsupportedFeatureError(
                "expected every read of a parameter in the backward to fit between its gather and its free, got "
                f"{[f'{fqn}: {reason.value}' for fqn, reason in unmoved]}; leave out the hooks that change these "
                "parameters in the backward, or run this step eagerly"
            )
        stabilise_calls(gm.graph, fake_mode)
        gm.recompile()
        unfilled = inputs.unfilled_positions(gm.graph)
        if not unfilled:
            return _compile(gm, example_inputs, self.options, "backward", inputs)
        gathers = inputs.gathers(unfilled)
        return FilledFirst(_compile(gm, example_inputs, self.options, "backward", inputs, gathers), unfilled)
