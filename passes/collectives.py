"""The collectives of a post-grad graph, and the packed buffers that the runtime sends and receives with them.

The runtime gathers a parameter group as one buffer, each rank's shards one behind the other, and reduces its gradients
in the same layout:

    gather                                      reduction
    packed = cat([shard, ...])                  packed = reshape(cat([rows, ...], 1), [-1])
    all_gather_into_tensor(packed)              reduce_scatter_tensor(packed)
    wait_tensor                                 wait_tensor
    reshape [ranks, -1]                         (convert, divide ...)
    split_with_sizes, dim 1                     split_with_sizes
    getitem: [ranks, numel of the shard]        getitem: [numel of the shard]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from compile_fsdp.compat import OpOverload, argument_aliasing
from compile_fsdp.passes.aliases import fake_arguments, find_fake_tensor
from compile_fsdp.passes.effects import Effects, is_barrier

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

GATHER = c10d.all_gather_into_tensor.default
REDUCE = c10d.reduce_scatter_tensor.default
WAIT = c10d.wait_tensor.default
NAME = "compile_fsdp_name"  # the key of a collective's name in its node's meta
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SPLIT = aten.split_with_sizes.default

# One tensor in, one of the same numel out, element by element.
_ELEMENTWISE = (
    torch.ops.prims.convert_element_type.default,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten._to_copy.default,
)

_COPIES = (aten.cat.default, aten.clone.default, aten.reshape.default, aten.constant_pad_nd.default)


@dataclass(frozen=True, slots=True)
class Packed:
    """A collective on a packed buffer.

    Attributes:
        pack: The `cat`.
        inputs: What it joins: by parameter, a shard or the rows of a gradient.
        before: Nodes from the `cat` to the collective, both excluded.
        collective: The all-gather or reduce-scatter.
        after: Nodes from the collective to the split, both excluded; the first is the wait.
        outputs: By parameter, the item of the split, or None where nothing reads it.
    """

    pack: fx.Node
    inputs: tuple[fx.Node, ...]
    before: tuple[fx.Node, ...]
    collective: fx.Node
    after: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]

    @property
    def ranks(self) -> int:
        return ranks_of(self.collective)

    @property
    def kind(self) -> object:
        """Equal for collectives that may share a pack."""
        chain = (*self.before, self.collective, *self.after)
        steps = [(node.target, node.args[1:], node.kwargs) for node in chain if node.target not in RESHAPES]
        tensor = find_fake_tensor(self.pack)
        assert tensor is not None
        return str((tensor.dtype, tensor.device, steps))

    def erase(self) -> None:
        """Take the collective out of the graph, once nothing reads its outputs."""
        split = next(iter(self.after[-1].users))
        chain = (self.pack, *self.before, self.collective, *self.after, split, *split.users)
        for node in reversed(chain):
            node.graph.erase_node(node)


def ranks_of(collective: fx.Node) -> int:
    """How many ranks an all-gather or reduce-scatter goes over."""
    ranks = collective.args[1 if collective.target is GATHER else 2]
    assert isinstance(ranks, int)
    return ranks


def find_packed(graph: fx.Graph, target: Callable[..., Any]) -> list[Packed]:
    """The packed collectives of one kind (GATHER or REDUCE), in graph order."""
    found = (_match(node) for node in graph.find_nodes(op="call_function", target=target))
    return [each for each in found if each is not None]


class Places:
    """Where the nodes of a graph stand, and what is written between them."""

    def __init__(self, graph: fx.Graph) -> None:
        effects = Effects(graph.owning_module)
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._barriers = list(accumulate(is_barrier(node, effects) for node in graph.nodes))

    def is_behind(self, node: fx.Node, other: fx.Node) -> bool:
        return self._order[node] > self._order[other]

    def is_written_between(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether a node between the two may write anything but the parameters that windows fill."""
        return self._barriers[self._order[first]] != self._barriers[self._order[last]]


def neighbours(packed: Sequence[Packed], may_join: Callable[[Packed, Packed], bool] | None) -> list[list[Packed]]:
    """The collectives in order, those that follow each other and may share packs in one list.

    Args:
        packed: The collectives.
        may_join: Whether a collective, and one behind it of the same kind, may be issued at one place; None for never.
    """
    if may_join is None:
        return [[each] for each in packed]
    runs: list[list[Packed]] = []
    for each in packed:
        if runs and each.kind == runs[-1][-1].kind and all(may_join(earlier, each) for earlier in runs[-1]):
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def positions(run: Sequence[Packed]) -> list[list[int]]:
    """Of what the collectives send, one behind the other, the positions that each sends: what `plan_packs` returns."""
    ends = accumulate((len(each.inputs) for each in run), initial=0)
    return [list(range(start, end)) for start, end in pairwise(ends)]


def _match(collective: fx.Node) -> Packed | None:
    before: list[fx.Node] = []
    node = collective.args[0]
    while isinstance(node, fx.Node) and _is_link(node):
        before.insert(0, node)
        node = node.args[0]
    if not (isinstance(node, fx.Node) and node.target is aten.cat.default and len(node.users) == 1):
        return None
    after: list[fx.Node] = []
    last = collective
    while len(last.users) == 1 and (_is_link(user := next(iter(last.users))) or user.target is WAIT):
        after.append(user)
        last = user
    if len(last.users) != 1 or (split := next(iter(last.users))).target is not _SPLIT:
        return None
    inputs, sizes = node.args[0], split.args[1]
    assert isinstance(inputs, Sequence) and isinstance(sizes, Sequence)
    if not after or after[0].target is not WAIT:
        return None
    items = {item.args[1]: item for item in split.users if item.target is operator.getitem}
    tensors = tuple(each for each in inputs if isinstance(each, fx.Node))
    if len(items) != len(split.users) or len(tensors) != len(inputs):
        return None
    is_gather = collective.target is GATHER
    outputs = tuple(map(items.get, range(len(sizes))))
    packed = Packed(node, tensors, tuple(before), collective, tuple(after), outputs)
    ranks = packed.ranks
    expected = [numel(each) if is_gather else numel(each) // ranks for each in packed.inputs]
    return packed if expected == list(sizes) else None


def _is_link(node: fx.Node) -> bool:
    """Whether the node is one that stands between a pack, its collective and its split, and nowhere else."""
    if len(node.users) != 1 or len(node.all_input_nodes) != 1:
        return False
    return node.target in RESHAPES or node.target in _ELEMENTWISE


def is_rearrangement(node: fx.Node) -> bool:
    """Whether the node only moves elements or changes their dtype: a view, a copy, a pack or an item."""
    target = node.target
    if target is operator.getitem or target in _ELEMENTWISE or target in _COPIES:
        return True
    aliasing = argument_aliasing(target) if isinstance(target, OpOverload) else ()
    return any(each.aliased and not each.written for each in aliasing)


def numel(node: fx.Node) -> int:
    """Elements of a node's tensor; -1 if there is none, or its size is symbolic."""
    tensor = find_fake_tensor(node)
    size = -1 if tensor is None else tensor.numel()
    return size if isinstance(size, int) else -1


def rename(launched: fx.Node, packed: Iterable[Packed]) -> None:
    """Name a collective that does the work of several."""
    names = dict.fromkeys(each.collective.meta.get(NAME, "") for each in packed)
    launched.meta[NAME] = ", ".join(filter(None, names))


def replace_uses(replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Replace nodes wherever they are read, all at once: one by one, the graph's output is rewritten for each."""
    for user in dict.fromkeys(user for node in replaced for user in node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda node: replaced.get(node, node))


def insert(graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point, with its fake value; `like` is where it comes from."""
    node = graph.call_function(target, args, kwargs)
    for key in ("stack_trace", "nn_module_stack", NAME):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = _infer(target, *fake_arguments(args), **kwargs)
    return node


def _infer(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The fake value of a call. Collectives are not run for it: that takes ten times as long."""
    if target is GATHER:
        tensor, ranks, _ = args
        return tensor.new_empty(tensor.numel() * ranks)
    if target is REDUCE:
        tensor, _, ranks, _ = args
        return tensor.new_empty(tensor.numel() // ranks)
    return args[0] if target is WAIT else target(*args, **kwargs)
