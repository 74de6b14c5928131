"""Collectives of a post-grad graph, and the runtime's packed buffers.

A collective is either the runtime's op, whose last argument is a name, or torch's op, which the model calls.

The runtime gathers a parameter group as one buffer, with the shards of each rank one behind the next, and reduces the
gradients of the group in that layout; packs made anew have the op of `ops/packs.py` for `cat`:

    gather                                      reduction
    packed = cat([shard, ...])                  packed = reshape(cat([rows, ...], 1), [-1])
    all_gather_into_tensor(packed)              reduce_scatter_tensor(packed)
    wait_tensor                                 wait_tensor
    reshape [ranks, -1]                         (convert, divide ...)
    split_with_sizes_copy, dim 1                split_with_sizes_copy
    getitem: [ranks, numel of the shard]        getitem: [numel of the shard]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_fsdp.ops import all_gather_into_tensor, cat, fetch, offload, reduce_scatter_tensor, split_with_sizes_copy
from compile_fsdp.passes.analysis.aliases import fake_arguments, find_fake_tensor, get_fake_tensor
from compile_fsdp.passes.analysis.subgraphs import reached
from compile_fsdp.torch_compat.dispatch import OpOverload, argument_aliasing, op_name

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_GATHERS = (c10d.all_gather_into_tensor.default, all_gather_into_tensor)
_REDUCTIONS = (c10d.reduce_scatter_tensor.default, reduce_scatter_tensor)
WAIT = c10d.wait_tensor.default
CAST = torch.ops.prims.convert_element_type.default
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

_JOINS = (aten.cat.default, cat)  # as traced, and as packed anew

# Ops from one tensor to a tensor of equal numel, element by element.
_ELEMENTWISE = (CAST, aten.div.Tensor, aten.mul.Tensor, aten._to_copy.default)

_COPIES = (
    aten.cat.default,
    aten.clone.default,
    aten.reshape.default,
    aten.constant_pad_nd.default,
    cat,
    split_with_sizes_copy,
)


@dataclass(frozen=True, slots=True)
class Packed:
    """A collective on a packed buffer."""

    pack: fx.Node  # the `cat`
    inputs: tuple[fx.Node, ...]  # of the `cat`, by parameter: a shard, or the rows of a gradient
    before: tuple[fx.Node, ...]  # from the `cat` to the collective, both excluded
    collective: fx.Node
    after: tuple[fx.Node, ...]  # from the collective to the split, both excluded; the first is the wait
    outputs: tuple[fx.Node | None, ...]  # items of the split, by parameter; None if nothing reads the item

    @property
    def ranks(self) -> int:
        return ranks_of(self.collective)

    @property
    def kind(self) -> object:
        """Key that is equal for collectives that may share a pack."""
        before, after = (
            [(node.target, node.args[1:], node.kwargs) for node in chain if node.target not in RESHAPES]
            for chain in (self.before, self.after)
        )
        tensor = get_fake_tensor(self.pack)
        collective = self.collective.target, settings_of(self.collective)
        return str((tensor.dtype, tensor.device, before, collective, after))

    def erase(self) -> None:
        """Erase the collective from the graph, when nothing reads its outputs."""
        split = next(iter(self.after[-1].users))
        chain = (self.pack, *self.before, self.collective, *self.after, split, *split.users)
        for node in reversed(chain):
            node.graph.erase_node(node)


def is_gather(node: fx.Node) -> bool:
    return node.target in _GATHERS


def is_reduction(node: fx.Node) -> bool:
    return node.target in _REDUCTIONS


def is_all_reduce(node: fx.Node) -> bool:
    return node.target is c10d.all_reduce.default


def is_offload(node: fx.Node) -> bool:
    return node.target is offload


def is_fetch(node: fx.Node) -> bool:
    """Return whether the node launches the copy of an offloaded tensor back; `wait_tensor` waits for it."""
    return node.target is fetch


def is_wait(node: fx.Node) -> bool:
    return node.target is WAIT


def settings_of(collective: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of an all-gather or reduce-scatter between tensor and name; last: ranks, process group."""
    return collective.args[1 : 3 if is_gather(collective) else 4]


def ranks_of(collective: fx.Node) -> int:
    *_, ranks, _ = settings_of(collective)
    assert isinstance(ranks, int)
    return ranks


def name_of(collective: fx.Node) -> str:
    """Return the name that a profile shows; empty for an unnamed collective, and for torch's."""
    name = collective.args[1 + len(settings_of(collective)) :]
    return str(name[0]) if name else ""


def find_packed(graph: fx.Graph, is_kind: Callable[[fx.Node], bool]) -> list[Packed]:
    """Return the packed collectives of a kind, `is_gather` or `is_reduction`, in graph order."""
    found = (_match(node) for node in graph.nodes if is_kind(node))
    return [each for each in found if each is not None]


def _match(collective: fx.Node) -> Packed | None:
    before: list[fx.Node] = []
    node = collective.args[0]
    while isinstance(node, fx.Node) and _is_link(node):
        before.insert(0, node)
        node = node.args[0]
    if not (isinstance(node, fx.Node) and node.target in _JOINS and len(node.users) == 1):
        return None
    after: list[fx.Node] = []
    last = collective
    while len(last.users) == 1 and (_is_link(user := next(iter(last.users))) or is_wait(user)):
        after.append(user)
        last = user
    if len(last.users) != 1 or (split := next(iter(last.users))).target is not split_with_sizes_copy:
        return None
    inputs, sizes = node.args[0], split.args[1]
    assert isinstance(inputs, Sequence) and isinstance(sizes, Sequence)
    if not after or not is_wait(after[0]):
        return None
    items = {item.args[1]: item for item in split.users if item.target is operator.getitem}
    tensors = tuple(each for each in inputs if isinstance(each, fx.Node))
    if len(items) != len(split.users) or len(tensors) != len(inputs):
        return None
    outputs = tuple(map(items.get, range(len(sizes))))
    packed = Packed(node, tensors, tuple(before), collective, tuple(after), outputs)
    parts = 1 if is_gather(collective) else packed.ranks
    expected = [numel(each) // parts for each in packed.inputs]
    return packed if expected == list(sizes) else None


def _is_link(node: fx.Node) -> bool:
    """Return whether the node may link pack, collective and split."""
    has_one_path = len(node.users) == 1 and len(node.all_input_nodes) == 1
    return has_one_path and (node.target in RESHAPES or node.target in _ELEMENTWISE)


def is_rearrangement(node: fx.Node) -> bool:
    """Return whether the node is a view, copy, pack, item or elementwise op of `_ELEMENTWISE`."""
    target = node.target
    if target is operator.getitem or target in _ELEMENTWISE or target in _COPIES:
        return True
    aliasing = argument_aliasing(target) if isinstance(target, OpOverload) else ()
    return any(each.aliased and not each.written for each in aliasing)


def rearranged(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and all nodes that only rearrange them."""
    return reached(nodes, lambda node: filter(is_rearrangement, node.users))


def numel(node: fx.Node) -> int:
    """Return the numel of a node's tensor; -1 if there is no tensor, or its size is symbolic."""
    tensor = find_fake_tensor(node)
    size = -1 if tensor is None else tensor.numel()
    return size if isinstance(size, int) else -1


def insert(graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point, with its fake value, and stack trace and modules of `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update((key, like.meta[key]) for key in ("stack_trace", "nn_module_stack") if key in like.meta)
    node.meta["val"] = _infer(target, *fake_arguments(args), **kwargs)
    return node


def _infer(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the fake value of a call; collectives are not run, because that takes ten times as long."""
    if target in _GATHERS:
        tensor, ranks, *_ = args
        return tensor.new_empty(tensor.numel() * ranks)
    if target in _REDUCTIONS:
        tensor, _, ranks, *_ = args
        return tensor.new_empty(tensor.numel() // ranks)
    return args[0] if target is WAIT else target(*args, **kwargs)


def is_collective(node: fx.Node) -> bool:
    return collective_arguments(node) is not None


def collective_arguments(node: fx.Node) -> dict[str, object] | None:
    """Return the arguments of a collective by name, and its "kind"; None if the node calls no collective."""
    op = getattr(node.target, "default", node.target)  # A Dynamo graph calls packets.
    if not isinstance(op, OpOverload) or op.namespace not in ("_c10d_functional", "_dtensor", "compile_fsdp"):
        return None
    names = [argument.name for argument in argument_aliasing(op)]
    if "group_name" not in names:
        return None
    return {"kind": op_name(op).split("::")[1], **dict(zip(names, node.args, strict=False)), **node.kwargs}
