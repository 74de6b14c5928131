"""Alias classes: which nodes may share a storage.

[Note: Fake storages tell the aliases]
The fake values in a traced graph share a storage exactly where the real values will, so an alias class is a set of
storages. Classes are joined where a fake value says too little: at a node without a fake value, at an op that hides its
aliasing (`wait_tensor` returns the buffer of the collective), and at a declared view whose fake value lies in a
different storage than its input's. `remove_unshard_copies` leaves such views, because a view keeps the metadata that it
had as a view of the parameter. So find aliases by these classes, never by fake values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.effects import Effects
from compile_fsdp.torch_compat.dispatch import OpOverload, argument_aliasing, plain_tensors, storage_key

UNKNOWN = object()


def fake_value(node: fx.Node) -> object:
    """Return the node's result, with fake tensors in the place of tensors.

    AOTAutograd sets it as "val", Dynamo as "example_value". UNKNOWN if neither did; None if the node returns None.
    """
    value = node.meta.get("val", UNKNOWN)
    return node.meta.get("example_value", UNKNOWN) if value is UNKNOWN else value


def fake_arguments(arguments: Any) -> Any:
    """Replace the nodes in arguments by their fake values."""
    return fx.node.map_arg(arguments, fake_value)  # type: ignore[arg-type]  # It maps to anything.


def call_target(target: Any, args: Any, kwargs: Any) -> Any:
    """Call a node's target: a function, or the name of a tensor's method."""
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def find_fake_tensor(node: object) -> torch.Tensor | None:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def get_fake_tensor(node: fx.Node) -> torch.Tensor:
    """Return the fake value of a node whose result is a tensor."""
    value = fake_value(node)
    assert isinstance(value, torch.Tensor)
    return value


def is_declared_view(node: fx.Node) -> bool:
    """Return whether the op's schema says that its result aliases an input."""
    target = node.target
    return isinstance(target, OpOverload) and any(each.aliased for each in argument_aliasing(target))


class Aliases:
    """Alias classes of the tensors in a graph, found in one pass."""

    def __init__(self, graph: fx.Graph, effects: Effects) -> None:
        self._joined: dict[int, int] = {}
        self._keys: dict[fx.Node, tuple[int, ...]] = {}
        for index, node in enumerate(graph.nodes):
            self._keys[node] = self._find_keys(node, effects, unknown_key=-1 - index)
        for node, keys in self._keys.items() if self._joined else ():
            self._keys[node] = tuple(dict.fromkeys(self._root(key) for key in keys))

    def classes(self, node: fx.Node) -> tuple[int, ...]:
        """Return the classes of the node's results: none, or one per storage."""
        return self._keys.get(node, ())

    def classes_of(self, nodes: Iterable[fx.Node]) -> Iterator[int]:
        """Yield the classes of several nodes' results."""
        return (key for node in nodes for key in self.classes(node))

    def _find_keys(self, node: fx.Node, effects: Effects, unknown_key: int) -> tuple[int, ...]:
        value = fake_value(node)
        if value is not UNKNOWN:
            keys = tuple(dict.fromkeys(unknown_key if key is None else key for key in storage_keys(value)))
            sources = effects.view_inputs(node) if keys else ()
        elif effects.has_result(node) and effects.subgraph(node) is None:
            keys, sources = (unknown_key,), node.all_input_nodes
        else:
            return ()
        for source in sources:
            for key in self._keys.get(source, ()):
                self._join(keys[0], key)
        return keys

    def _root(self, key: int) -> int:
        while (parent := self._joined.get(key)) is not None:
            self._joined[key] = self._joined.get(parent, parent)  # Halving the path keeps chains of joins short.
            key = parent
        return key

    def _join(self, left: int, right: int) -> None:
        left, right = self._root(left), self._root(right)
        if left != right:
            self._joined[left] = right


def storage_keys(value: object) -> Iterator[int | None]:
    """Yield the storage keys of a fake value; None without a storage."""
    return map(storage_key, plain_tensors(value))
