"""Collectives of a post-grad graph, and the runtime's packed buffers.

A collective is either the runtime's op, whose last argument is a name, or torch's op, which the model calls.

The runtime gathers a parameter group as one buffer, with the shards of each rank one behind the next, and reduces the
gradients of the group in that layout:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from compile_fsdp import ops
from compile_fsdp.passes.analysis.aliases import fake_arguments, find_fake_tensor
from compile_fsdp.passes.analysis.effects import Effects, is_barrier
from compile_fsdp.torch_compat.dispatch import OpOverload, OpOverloadPacket, argument_aliasing, op_name

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_GATHERS = (c10d.all_gather_into_tensor.default, ops.all_gather_into_tensor)
_REDUCTIONS = (c10d.reduce_scatter_tensor.default, ops.reduce_scatter_tensor)
WAIT = c10d.wait_tensor.default
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SPLIT = aten.split_with_sizes.default

# Ops from one tensor to a tensor of equal numel, element by element.
_ELEMENTWISE = (
    torch.ops.prims.convert_element_type.default,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten._to_copy.default,
)

_COPIES = (
    aten.cat.default,
    aten.clone.default,
    aten.reshape.default,
    aten.constant_pad_nd.default,
    ops.cat,
    ops.split_with_sizes_copy,
)


@dataclass(frozen=True, slots=True)
class Packed:
    """A collective on a packed buffer.

    Attributes:
        pack: The `cat`.
        inputs: Tensors that the `cat` joins, by parameter: a shard, or the rows of a gradient.
        before: Nodes from the `cat` to the collective, both excluded.
        collective: The all-gather or reduce-scatter.
        after: Nodes from the collective to the split, both excluded; the first is the wait.
        outputs: By parameter, the item of the split; None if nothing reads the item.
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
        """Key that is equal for collectives that may share a pack."""
        before, after = (
            [(node.target, node.args[1:], node.kwargs) for node in chain if node.target not in RESHAPES]
            for chain in (self.before, self.after)
        )
        tensor = find_fake_tensor(self.pack)
        assert tensor is not None
        collective = self.collective.target, _settings(self.collective)
        return str((tensor.dtype, tensor.device, before, collective, after))

    def erase(self) -> None:
        """Erase the collective from the graph, when nothing reads its outputs."""
        split = next(iter(self.after[-1].users))
        chain = (self.pack, *self.before, self.collective, *self.after, split, *split.users)
        for node in reversed(chain):
            node.graph.erase_node(node)


def is_gather(node: fx.Node) -> bool:
    """Return whether the node launches an all-gather."""
    return node.target in _GATHERS


def is_reduction(node: fx.Node) -> bool:
    """Return whether the node launches a reduce-scatter."""
    return node.target in _REDUCTIONS


def is_offload(node: fx.Node) -> bool:
    """Return whether the node launches a copy to host memory."""
    return node.target is ops.offload


def is_fetch(node: fx.Node) -> bool:
    """Return whether the node launches the copy of an offloaded tensor back.

    `wait_tensor` waits for the copy as for a collective.
    """
    return node.target is ops.fetch


def is_wait(node: fx.Node) -> bool:
    return node.target is WAIT


def _settings(collective: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a collective without its tensor and its name.

    The number of ranks and the process group come last.
    """
    return collective.args[1 : 3 if is_gather(collective) else 4]


def ranks_of(collective: fx.Node) -> int:
    """Return the number of ranks of an all-gather or reduce-scatter."""
    *_, ranks, _ = _settings(collective)
    assert isinstance(ranks, int)
    return ranks


def group_of(collective: fx.Node) -> str:
    """Return the process group's name of an all-gather or reduce-scatter."""
    return str(_settings(collective)[-1])


def name_of(collective: fx.Node) -> str:
    """Return the name that a profile shows of an all-gather or reduce-scatter.

    Empty for an unnamed collective, and for torch's.
    """
    name = collective.args[1 + len(_settings(collective)) :]
    return str(name[0]) if name else ""


def find_packed(graph: fx.Graph, is_kind: Callable[[fx.Node], bool]) -> list[Packed]:
    """Return the packed collectives of one kind, in graph order.

    `is_kind`: `is_gather` or `is_reduction`.
    """
    found = (_match(node) for node in graph.nodes if is_kind(node))
    return [each for each in found if each is not None]


class Places:
    """Places of the nodes in a graph, and writes between them."""

    def __init__(self, graph: fx.Graph) -> None:
        effects = Effects(graph.owning_module)
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._barriers = list(accumulate(is_barrier(node, effects) for node in graph.nodes))

    def is_behind(self, node: fx.Node, other: fx.Node) -> bool:
        return self._order[node] > self._order[other]

    def is_written_between(self, first: fx.Node, last: fx.Node) -> bool:
        """Return whether a node between the two may write.

        Writes of the parameters that windows fill do not count.
        """
        return self._barriers[self._order[first]] != self._barriers[self._order[last]]


def joinable(packed: Sequence[Packed], may_join: Callable[[Packed, Packed], bool] | None) -> list[list[Packed]]:
    """Group the collectives into runs that may share packs.

    The members of a run are of one kind. Any nodes may stand between them.

    Args:
        packed: The collectives.
        may_join: Whether a collective, and a later collective of its kind, may be issued at one place; None for never.
    """
    if may_join is None:
        return [[each] for each in packed]
    runs: list[list[Packed]] = []
    latest: dict[object, list[Packed]] = {}
    for each in packed:
        kind = each.kind
        run = latest.get(kind, [])
        if not run or not all(may_join(earlier, each) for earlier in run):
            run = latest[kind] = []
            runs.append(run)
        run.append(each)
    return runs


def positions(run: Sequence[Packed]) -> list[list[int]]:
    """Return each collective's input positions among all inputs of a run.

    The format is the result of `plan_packs`.
    """
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
    while len(last.users) == 1 and (_is_link(user := next(iter(last.users))) or is_wait(user)):
        after.append(user)
        last = user
    if len(last.users) != 1 or (split := next(iter(last.users))).target is not _SPLIT:
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
    """Return whether the node may link pack, collective and split.

    A link has one input and one user.
    """
    if len(node.users) != 1 or len(node.all_input_nodes) != 1:
        return False
    return node.target in RESHAPES or node.target in _ELEMENTWISE


def is_rearrangement(node: fx.Node) -> bool:
    """Return whether the node is a view, copy, pack or item.

    Elementwise ops of `_ELEMENTWISE` count, too.
    """
    target = node.target
    if target is operator.getitem or target in _ELEMENTWISE or target in _COPIES:
        return True
    aliasing = argument_aliasing(target) if isinstance(target, OpOverload) else ()
    return any(each.aliased and not each.written for each in aliasing)


def numel(node: fx.Node) -> int:
    """Return the numel of a node's tensor.

    -1 if there is no tensor, or its size is symbolic.
    """
    tensor = find_fake_tensor(node)
    size = -1 if tensor is None else tensor.numel()
    return size if isinstance(size, int) else -1


def replace_uses(replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Replace nodes wherever they are read, all at once.

    Replacing them one by one rewrites the graph's output for each node.
    """
    for user in dict.fromkeys(user for node in replaced for user in node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda node: replaced.get(node, node))


def insert(graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point, with its fake value.

    The call gets the stack trace and the modules of `like`.
    """
    node = graph.call_function(target, args, kwargs)
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = _infer(target, *fake_arguments(args), **kwargs)
    return node


def launch(graph: fx.Graph, sent: fx.Node, sources: Sequence[Packed], like: fx.Node) -> fx.Node:
    """Add a collective that sends `sent` and has the settings of `like`.

    `sent` holds tensors that the collectives of `sources` were to send. The name of a runtime's op joins all their
    names.
    """
    name: tuple[str, ...] = ()
    if like.target in (ops.all_gather_into_tensor, ops.reduce_scatter_tensor):
        names = dict.fromkeys(name_of(each.collective) for each in sources)
        name = (", ".join(filter(None, names)),)
    assert callable(like.target)
    return insert(graph, like.target, sent, *_settings(like), *name, like=like)


def are_merged(sources: Sequence[Packed]) -> bool:
    """Return whether a pack holds inputs of several collectives.

    `sources`: the collective that each input is from, in order. See [Note: Kernels of a merged pack].
    """
    return sources[0] is not sources[-1]


def _infer(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the fake value of a call.

    Collectives are not run, because that takes ten times as long.
    """
    if target in _GATHERS:
        tensor, ranks, *_ = args
        return tensor.new_empty(tensor.numel() * ranks)
    if target in _REDUCTIONS:
        tensor, _, ranks, *_ = args
        return tensor.new_empty(tensor.numel() // ranks)
    return args[0] if target is WAIT else target(*args, **kwargs)


def is_collective(node: fx.Node) -> bool:
    """Return whether a node launches a collective."""
    return collective_arguments(node) is not None


def collective_arguments(node: fx.Node) -> dict[str, object] | None:
    """Return the arguments of a collective by name, and its "kind".

    None if the node calls no collective.
    """
    target = node.target
    op = target.default if isinstance(target, OpOverloadPacket) and hasattr(target, "default") else target
    if not isinstance(op, OpOverload) or op.namespace not in ("_c10d_functional", "compile_fsdp"):
        return None
    names = [argument.name for argument in argument_aliasing(op)]
    if "group_name" not in names:
        return None
    return {"kind": op_name(op).split("::")[1], **dict(zip(names, node.args, strict=False)), **node.kwargs}
