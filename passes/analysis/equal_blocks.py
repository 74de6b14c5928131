"""Find blocks of a Dynamo graph that compute the same on different inputs.

[Note: What makes blocks equal]
A block is a run of neighbouring ops without a side effect; it ends where the graph fills or frees a parameter, calls a
hook, switches autograd, or does anything else. Two blocks are equal if their ops are, with their constants and wiring,
if the same regions of autocast contain them, and if their inputs have equal types, shapes, strides, dtypes, devices and
needs of a gradient. Nothing else decides, so two layers of one class may differ, and two of different classes may be
equal. Equal blocks whose ops a memory budget
marks differently are variants of one another, and each variant is compiled, even for one call.

[Note: Checkpoints in blocks]
A user's activation checkpoint is one op with a body. It may belong to a block if all ops of its body may. The attribute
that holds the body is then an op of the block. Its text has the ops of the body, and the function by which the user
selects the saved values, if any. AOTAutograd makes a backward that runs the body again.

[Note: Sums of gradients]
Autograd adds the gradients of a tensor with several readers one by one. A block hands over one gradient for each input.
If the input has other readers too, this must be the gradient of one op, or the sum would be rounded differently; an
argument of the module is no such input, because the module reads an alias. And a block has only one output with a
gradient, because an output that the loss does not use would get zeros in place of no gradient.

[Note: Casts of parameters]
Autocast casts a parameter once for all ops of a region that read it, and adds their gradients before the cast. A block
is traced without this, so each of its parameters may have one reader only. Other tensors are cast for each reader.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from compile_fsdp.ops import watch
from compile_fsdp.passes.analysis.aliases import fake_value, storage_keys
from compile_fsdp.passes.analysis.eager_effects import (
    EagerEffects,
    is_autocast_switch,
    is_grad_switch,
    is_mode_switch,
    is_torch_function,
    is_upkeep,
    switched_attention,
    target_name,
)
from compile_fsdp.passes.analysis.effects import nodes_in
from compile_fsdp.passes.analysis.function_text import function_text
from compile_fsdp.torch_compat.dispatch import (
    CHECKPOINT_CONTEXTS,
    HigherOrderOperator,
    is_checkpoint,
    is_plain_fake,
    op_name,
    tree_leaves,
)
from compile_fsdp.torch_compat.dynamo import recomputation
from compile_fsdp.torch_compat.global_state import attention_backends, autocast_dtypes

_FEWEST = 5  # fewest ops that are worth a call


@dataclass(frozen=True, eq=False, slots=True)
class BlockCall:
    """The ops of one block in a graph."""

    ops: list[fx.Node]  # in graph order, each body of a checkpoint before its call
    op_count: int  # number of ops, those of bodies included
    sizes: list[fx.Node]  # inputs that are symbolic sizes
    tensors: list[fx.Node]  # inputs that are tensors
    outputs: list[fx.Node]  # ops whose results are read outside of the block
    regions: tuple[fx.Node, ...]  # ops that open the regions of autocast around the block, the outermost first
    text: str  # equal for equal blocks with equal marks


def find_equal_blocks(graph: fx.Graph) -> list[list[BlockCall]]:
    """Return the blocks of a graph that have equals, in lists of equals with equal marks."""
    found: dict[object, dict[str, list[BlockCall]]] = {}
    if any(is_mode_switch(node) and not is_autocast_switch(node) for node in graph.nodes):
        return []  # ops in different modes differ, although they look equal
    effects = EagerEffects(graph.owning_module)
    for ops, regions in _runs(graph, effects):
        targets = [*_targets(ops, effects)]
        if len(targets) >= _FEWEST and (call := _describe(ops, len(targets), effects, regions)) is not None:
            marks = " ".join(str(recomputation(node)) for node in ops)
            variants = found.setdefault((call.text, *targets), {})
            variants.setdefault(marks, []).append(replace(call, text=f"{call.text}\n{marks}"))
    several = (variants for variants in found.values() if sum(map(len, variants.values())) > 1)
    return [equals for variants in several for equals in variants.values()]


def _runs(graph: fx.Graph, effects: EagerEffects) -> Iterator[tuple[list[fx.Node], tuple[fx.Node, ...]]]:
    """Yield the runs of ops that only compute while autograd records them, or in a graph without a backward.

    Ops for which the graph chooses backends of attention are in no run, because a block is traced without this choice.
    The second item are the ops that open the regions of autocast around the run.
    """
    run: list[fx.Node] = []
    regions: tuple[fx.Node, ...] = ()
    records, has_own_attention = True, False
    for node in graph.nodes:
        is_size = isinstance(fake_value(node), torch.SymInt) and not any(each in run for each in node.all_input_nodes)
        if is_size or node.op in ("placeholder", "get_attr"):
            continue  # because the node may stand before all of the run
        if records and not has_own_attention and _only_computes(node, effects):
            run += [*_bodies(node, effects), node]
            continue
        if run:
            yield run, regions
        run = []
        if is_grad_switch(node):
            records = bool(node.args[0])
        elif is_autocast_switch(node):
            regions = regions[:-1] if node.args[0] in regions else (*regions, node)
        elif (switched := switched_attention(node)) is not None:
            backends, by_priority = switched
            has_own_attention = backends != attention_backends(by_priority)


def _only_computes(node: fx.Node, effects: EagerEffects) -> bool:
    if is_checkpoint(node):
        return all(map(_body_only_computes, _bodies(node, effects).values()))
    if is_mode_switch(node) or not is_torch_function(node) or effects.written_inputs(node):
        return False
    if not isinstance(node.target, str) and not hasattr(node.target, "__qualname__"):
        return False
    return all(map(is_plain_fake, tree_leaves(fake_value(node))))


def _body_only_computes(body: fx.GraphModule) -> bool:
    inner = EagerEffects(body)
    ops = (node for node in body.graph.nodes if node.op not in ("placeholder", "output"))
    are_known = all(inner.subgraph(node) is not None or _only_computes(node, inner) for node in ops)
    return are_known and function_text(body.meta.get(CHECKPOINT_CONTEXTS)) is not None


def _bodies(node: fx.Node, effects: EagerEffects) -> dict[fx.Node, fx.GraphModule]:
    """Return the graphs that an op runs, by the attributes that hold them."""
    return {each: body for each in node.all_input_nodes if (body := effects.subgraph(each)) is not None}


def _targets(nodes: Iterable[fx.Node], effects: EagerEffects) -> Iterator[Any]:
    """Yield the functions and methods that the nodes call, and those that bodies call."""
    for node in nodes:
        if (body := effects.subgraph(node)) is not None:
            yield from _targets(body.graph.nodes, EagerEffects(body))
        elif node.op in ("call_function", "call_method"):
            yield node.target


def _describe(
    ops: list[fx.Node], op_count: int, effects: EagerEffects, regions: tuple[fx.Node, ...]
) -> BlockCall | None:
    """Describe a run of ops; None if it cannot become a call."""
    numbers = {node: f"op {i}" for i, node in enumerate(ops)}
    inputs: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> _Word:
        return _Word(numbers.get(node) or inputs.setdefault(node, f"input {len(inputs)}"))

    lines = [*(f"autocast {each.args}" for each in regions), *(_describe_op(node, name, effects) for node in ops)]
    outputs = [node for node in ops if any(user not in numbers for user in node.users)]
    casts = bool(regions or autocast_dtypes())
    if not all(_adds_as_before(node, numbers, casts) for node in inputs):
        return None
    results: list[Any] = [fake_value(node) for node in outputs]
    values = [fake_value(node) for node in inputs]
    if not all(isinstance(each, torch.SymInt) or is_plain_fake(each) for each in values):
        return None
    if not all(map(is_plain_fake, results)):
        return None  # a tuple, whose items are read outside
    if sum(each.requires_grad for each in results) > 1:
        return None  # see [Note: Sums of gradients]
    storages = [*storage_keys(results)]
    if len({*storages}) < len(storages) or {*storages} & {*storage_keys(values)}:
        return None  # the results of a call alias neither its inputs nor one another
    lines += map(_describe_value, values)
    lines.append(repr([(numbers[node], result.requires_grad) for node, result in zip(outputs, results, strict=True)]))
    tensors = [node for node, value in zip(inputs, values, strict=True) if isinstance(value, torch.Tensor)]
    # All symbols of the block are inputs, because the guards of a compiled graph are on its inputs.
    symbols = set().union(*map(free_symbols, (*values, *results)))
    placeholders = ops[0].graph.find_nodes(op="placeholder") if symbols else ()
    known = {symbol: node for node in placeholders if (symbol := _symbol_of(node))}
    if not symbols <= known.keys():
        return None
    sizes = [node for node in inputs if node not in tensors]
    sizes += [node for symbol, node in known.items() if symbol in symbols and node not in sizes]
    return BlockCall(ops, op_count, sizes, tensors, outputs, regions, "\n".join(lines))


def _symbol_of(node: fx.Node) -> object:
    """Return the symbol that a placeholder stands for; None for an expression and for anything else."""
    value = fake_value(node)
    return value.node.expr if isinstance(value, torch.SymInt) and value.node.expr.is_symbol else None


def _describe_op(node: fx.Node, name: Callable[[fx.Node], _Word], effects: EagerEffects) -> str:
    if (body := effects.subgraph(node)) is not None:
        numbers, inner = {each: _Word(f"op {i}") for i, each in enumerate(body.graph.nodes)}, EagerEffects(body)
        lines = [_describe_op(each, numbers.__getitem__, inner) for each in numbers]
        return "\n".join([f"body {function_text(body.meta.get(CHECKPOINT_CONTEXTS))}", *lines, "end"])
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), name)
    target = "" if node.op in ("placeholder", "output") else _describe_target(node.target)
    return f"{node.op} {target} {args!r} {kwargs!r}"


def _adds_as_before(node: fx.Node, ops: Container[fx.Node], casts: bool) -> bool:
    """Return whether an input's gradient is added up as without the block; see [Note: Sums of gradients].

    `casts`: whether the block is under autocast; see [Note: Casts of parameters].
    """
    value = fake_value(node)
    if not (isinstance(value, torch.Tensor) and value.requires_grad):
        return True
    readers = [user for user in node.users if user in ops]
    reads = [each for user in readers for each in nodes_in((user.args, user.kwargs)) if each is node]
    is_read_here = all(user in ops or is_upkeep(user) or user.target is watch for user in node.users)
    if casts and value.is_leaf:
        return is_read_here and len(reads) == 1
    return is_read_here or (len(reads) == 1 and target_name(readers[0]) in _DIFFERENTIATED_AT_ONCE)


# Names of functions whose gradient autograd adds once to that of an input, not once for each op that they consist of.
_DIFFERENTIATED_AT_ONCE = ("linear", "silu", "gelu", "relu", "tanh", "add", "mul", "view", "transpose")


class _Word(str):
    """A string that `repr` leaves as it is, so that it differs from a constant."""

    def __repr__(self) -> str:
        return f"<{self}>"


def _describe_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, HigherOrderOperator):
        return op_name(target)
    owner = getattr(target, "__objclass__", None) or target
    # Functions that torch makes in a loop, such as those of pooling, have one qualified name and different names.
    return f"{owner.__module__}.{target.__qualname__} {target.__name__}"


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.SymInt):
        return f"size {value}"
    layout = tuple(value.shape), value.stride()
    return f"{layout} {value.dtype} {value.device} {value.layout} {value.requires_grad}"
