"""Compile each block of a forward graph once for all its equals.

AOTAutograd traces the block by itself and partitions it, as it would partition the whole graph. The forward, and the
backward in parts, are then compiled as graphs without autograd. Each returns nothing that aliases its inputs: saved
inputs are passed again, so no tensor that a block saves keeps an unsharded parameter in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.backend.capturable import check_capturable
from compile_fsdp.backend.cpu_probe import await_cpu_probe
from compile_fsdp.backend.derived_backward import DERIVED_BACKWARD, GraphTracer, UnusedBackward, can_be_rebuilt
from compile_fsdp.backend.progress import Phase
from compile_fsdp.ops.call_block import Backward, Block, Part, Signature, find_block
from compile_fsdp.options import Options
from compile_fsdp.passes.analysis.aliases import Aliases, fake_value, get_fake_tensor
from compile_fsdp.passes.analysis.costs import work_of
from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.passes.analysis.equal_blocks import BlockCall
from compile_fsdp.passes.cache_key import cache_key
from compile_fsdp.passes.partitioned.call_random_ops import call_random_ops
from compile_fsdp.passes.partitioned.cut_backward import cut_backward
from compile_fsdp.passes.partitioned.drop_random_states import (
    drop_random_states,
    is_random,
    is_state,
    reads_random_state,
)
from compile_fsdp.passes.partitioned.saved_sizes import saved_sizes
from compile_fsdp.torch_compat.dispatch import forget_recomputation
from compile_fsdp.torch_compat.global_state import (
    attention_backends,
    autocast_dtypes,
    without_autocast,
    without_cast_cache,
)
from compile_fsdp.torch_compat.inductor import (
    CustomPartitionerFn,
    compile_op_by_op,
    functorch_config,
    inductor_compilers,
    innermost,
    min_cut_partition,
    separate_trace,
    settings_hash,
    stored_graph,
)


class BlockCompiler:
    """Compiles the blocks of one forward graph."""

    def __init__(self, options: Options, has_backward: bool) -> None:
        self.options = options
        self.has_backward = has_backward
        self.blocks: list[Block] = []  # that the graph calls

    def __call__(self, call: BlockCall, count: int) -> str | None:
        """Compile a block that has `count` calls, and return its name; None if it cannot be called."""
        options = self.options
        given = options.inner_backend, options.inductor, self.has_backward, settings_hash()
        matmul = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        dtypes = torch.get_default_dtype(), autocast_dtypes()
        kernels = attention_backends(by_priority=True)
        key = cache_key(call.text, *given, *matmul, torch.get_num_threads(), *dtypes, kernels)[:32]
        names = (f"{key}_{number}" if number else key for number in itertools.count())
        # A block with symbolic sizes holds for the guards that compiling it adds to this graph, and to no other graph.
        name = next(each for each in names if not (call.sizes and find_block(each)))
        block = find_block(name)
        if block is None:
            shared = f"that {count} modules share," if count > 1 else "of one module,"
            with Phase(f"compiling {call.op_count} ops {shared}", options.progress):
                block = self._compile(name, call)
        if block is not None:
            self.blocks.append(block)
        return None if block is None else name

    def _compile(self, name: str, call: BlockCall) -> Block | None:
        needs_gradient = tuple(get_fake_tensor(node).requires_grad for node in call.outputs)
        graphs = _trace(call, self.options, self.has_backward and any(needs_gradient))
        nodes = [node for graph in graphs for node in graph.nodes]
        if not all(node.op != "get_attr" and can_be_rebuilt(node) for node in nodes):
            return None  # calls have no constants
        if self.options.cuda_graphs:
            for graph in graphs:
                check_capturable(graph, "block")
        if len(graphs) == 1:
            return Block(self._compile_part(name, graphs[0]))
        forward, backward = graphs
        taken = [node.name for node in backward.find_nodes(op="placeholder") if not _is_tensor(node)]
        if (sizes := saved_sizes(forward, taken)) is None:
            return None
        signature = _separate(forward, backward, call, needs_gradient)
        random_ops = call_random_ops(forward, name)
        draws = tuple(self._compile_part(each, graph, op_by_op=True) for each, graph in random_ops.items())
        part = self._compile_part(name, forward)
        backward_parts = self._backward(name, backward, signature, call)
        return Block(part, backward_parts, signature, draws, _without_values(sizes) if taken else None)

    def _backward(self, name: str, graph: fx.Graph, signature: Signature, call: BlockCall) -> Backward:
        results = _without_aliases(graph)
        pairs = zip(signature.gradients, results, strict=True)
        gradients = [node for i, node in pairs if call.tensors[i].op == "placeholder"]
        values = list(filter(_is_tensor, graph.find_nodes(op="placeholder")))
        parts = []
        for i, part in enumerate(cut_backward(graph, results, gradients)):
            inputs = tuple(map(values.index, filter(_is_tensor, part.inputs)))
            parts.append((self._compile_part(f"{name} backward {i}", part.graph), inputs))
            values += part.results
        return Backward(tuple(parts), tuple(map(values.index, results)))

    def _compile_part(self, name: str, graph: fx.Graph, op_by_op: bool = False) -> Part:
        """Compile a graph without autograd."""
        graph.output_node().args = (tuple(_without_aliases(graph)),)
        examples = [fake_value(node) for node in graph.find_nodes(op="placeholder")]
        work = tuple(work for node in graph.nodes if any(work := work_of(node)))
        results = map(get_fake_tensor, _results(graph))
        layouts = [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in results]
        is_fixed = all(isinstance(size, int) for layout in layouts for size in (*layout[0], *layout[1]))
        draws = any(map(is_random, graph.nodes))
        plain, run, stored = _without_values(graph), None, None
        if self.options.inner_backend == "inductor" and not op_by_op:
            compile_fx, _ = inductor_compilers()
            await_cpu_probe()
            # A later graph that calls the block may be stored.
            storable = functorch_config.patch({"bundled_autograd_cache": True})
            # The ops have been cast.
            with torch.no_grad(), without_autocast(), storable, separate_trace(examples):
                gm = fx.GraphModule({}, graph)
                compiled = compile_fx(gm, examples, config_patches=dict(self.options.inductor))
            run, stored = innermost(compiled), stored_graph(compiled)
        return Part(run, name, plain, work, tuple(layouts) if is_fixed else None, draws, stored)


def _separate(forward: fx.Graph, backward: fx.Graph, call: BlockCall, needs_gradient: tuple[bool, ...]) -> Signature:
    """Drop saved inputs from a forward's results, and missing gradients from a backward's."""
    inputs, results = forward.find_nodes(op="placeholder"), _results(forward)
    tensors, count = inputs[len(call.sizes) :], len(call.outputs)
    saved_results = [each for each in results[count:] if each not in inputs and _is_tensor(each)]
    results = [*dict.fromkeys([*results[:count], *saved_results])]
    names = [node.name for node in (*tensors, *results)]
    forward.output_node().args = (tuple(results),)
    gradients = {i - len(call.sizes): node for i, node in enumerate(_results(backward)) if node is not None}
    backward.output_node().args = (tuple(gradients.values()),)
    taken = backward.find_nodes(op="placeholder")
    saved, tangents = taken[: -sum(needs_gradient)], taken[-sum(needs_gradient) :]
    # The partitioner names what the backward takes like the node of the forward.
    places = {name: i for i, name in enumerate(names)}
    # States of random numbers have names of their own, and the same order.
    states = [places[node.name] for node in results if is_state(node)]
    places |= zip((node.name for node in saved if any(map(reads_random_state, node.users))), states, strict=True)
    return Signature(
        differentiable=needs_gradient,
        saved=tuple(places[node.name] for node in filter(_is_tensor, saved)),
        strides=tuple(None if each.is_contiguous() else each.stride() for each in map(get_fake_tensor, tangents)),
        gradients=tuple(gradients),
    )


def _without_aliases(graph: fx.Graph) -> list[fx.Node]:
    """Copy results that alias inputs or earlier results, such as a saved tensor of which the block returns a view."""
    aliases = Aliases(graph, Effects(None))
    found = set(aliases.classes_of(graph.find_nodes(op="placeholder")))
    separate = []
    for node in _results(graph):
        classes = aliases.classes(node)
        if not found.isdisjoint(classes):
            with graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta, node = node.meta, copy
        found.update(classes)
        separate.append(node)
    return separate


def _trace(call: BlockCall, options: Options, has_backward: bool) -> list[fx.Graph]:
    """Return the graphs of a block's forward and, if it has one, its backward, as AOTAutograd makes them."""
    gm = fx.GraphModule(call.ops[0].graph.owning_module or {}, _copy(call))
    examples = [_fresh(fake_value(node)) for node in (*call.sizes, *call.tensors)]
    found: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        if not has_backward:
            found.append(gm.graph)
        return UnusedBackward()

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, ...]:
        assert kwargs["num_fwd_outputs"] == len(call.outputs)
        halves = (options.inductor.get("custom_partitioner_fn") or min_cut_partition)(joint, inputs, **kwargs)
        found.extend(_clone(half.graph) for half in halves)
        for graph in found:
            drop_random_states(graph)
            for node in graph.nodes:
                forget_recomputation(node)  # the graph has both runs of each op
        return halves

    settings = {**DERIVED_BACKWARD, "enable_autograd_cache": False}
    patched = functorch_config.patch(settings)
    with patched, separate_trace(examples), torch.set_grad_enabled(has_backward), without_cast_cache():
        if options.inner_backend == "aot_eager":
            compile_op_by_op(gm, examples, partition, keep)
        else:
            compile_fx, _ = inductor_compilers()
            patches = {**options.inductor, "custom_partitioner_fn": _Partitioner(partition)}
            compile_fx(gm, examples, inner_compile=keep, config_patches=patches)
    return found


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Callable[..., Any]) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        """Turn caching off, because this partitioner keeps its graphs."""


def _copy(call: BlockCall) -> fx.Graph:
    graph, copies = fx.Graph(), {}
    for i, node in enumerate((*call.sizes, *call.tensors)):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["example_value"] = fake_value(node)
    # Without autocast's cache: see [Note: Casts of parameters].
    opened = [graph.create_node("call_function", each.target, (*each.args[:3], False)) for each in call.regions]
    for node in call.ops:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for each, copy in zip(reversed(call.regions), reversed(opened), strict=True):
        (close,) = each.users
        graph.create_node("call_function", close.target, (copy,))
    graph.output(tuple(copies[node] for node in call.outputs))
    return graph


def _clone(graph: fx.Graph) -> fx.Graph:
    clone = fx.Graph()
    clone.output(clone.graph_copy(graph, {}))
    return clone


def _without_values(graph: fx.Graph) -> fx.GraphModule:
    """Copy a graph without its fake values, in a form that can be pickled."""
    plain = _clone(graph)
    for node in plain.nodes:
        node.meta.clear()
    gm = fx.GraphModule({}, plain)
    gm._tracer_cls = GraphTracer
    return gm


def _fresh(value: Any) -> Any:
    """Return a fake tensor like another one, without its history and storage; a size as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    assert hasattr(value, "fake_mode")
    with value.fake_mode:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad)


def _results(graph: fx.Graph) -> list[Any]:
    (results,) = graph.output_node().args
    assert isinstance(results, (tuple, list))
    return list(results)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)
