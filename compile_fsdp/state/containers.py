"""Walk and encode a parameter's optimizer state: tensors, numbers, and nested containers of both.

[Note: Containers in DCP]
torch.distributed.checkpoint turns every dict key into a string, drops empty dicts, and pickles a tuple whole, including
its tensors. `encode` converts state that DCP would change into a flat dict of its tensors and a picture of its
containers, in which a `Place` stands for each tensor. A plain dict of tensors and numbers is saved as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

PICTURE = "__containers__"  # the key of the picture in an encoded state


class Place:
    """Stands in a picture for a tensor that is saved beside it."""

    def __init__(self, name: str) -> None:
        self.name = name


def map_leaves(value: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """Copy nested dicts, lists and tuples with `function(name, leaf)` in place of each leaf; names are dotted paths."""
    if isinstance(value, dict):
        return {key: map_leaves(each, function, join(name, key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        mapped = [map_leaves(each, function, join(name, index)) for index, each in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            return type(value)(*mapped)
        return tuple(mapped) if isinstance(value, tuple) else mapped
    return function(name, value)


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """The (name, leaf) pairs of nested dicts, lists and tuples."""
    found: list[tuple[str, Any]] = []
    map_leaves(value, lambda name, leaf: found.append((name, leaf)))
    yield from found


def encode(state: dict[Any, Any]) -> dict[str, Any]:
    """Encode a parameter's state so that DCP restores it unchanged. See [Note: Containers in DCP]."""
    if state and all(isinstance(key, str) and _is_plain(value) for key, value in state.items()):
        return state
    return _with_picture(state)


def encode_extra(value: Any) -> Any:
    """Encode a module's extra state if DCP would change it."""
    return _with_picture(value) if _is_changed(value) else value


def _with_picture(value: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {}

    def take_out(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors[name] = leaf
        return Place(name)

    picture = map_leaves(value, take_out)
    return {**tensors, PICTURE: (picture,)}  # in a tuple, DCP pickles it as it is


def decode(state: dict[str, Any]) -> Any:
    if PICTURE not in state:
        return state
    (picture,) = state[PICTURE]
    return map_leaves(picture, lambda _, leaf: state[leaf.name] if isinstance(leaf, Place) else leaf)


def _is_plain(value: Any) -> bool:
    """Whether DCP restores a value unchanged: no dict, and no list or tuple of tensors or containers."""
    if isinstance(value, (list, tuple)):
        return not any(isinstance(each, (Tensor, dict, list, tuple)) for each in value)
    return not isinstance(value, dict)


def _is_changed(value: Any) -> bool:
    """Whether DCP changes nested dicts and lists: dicts that are empty, or have keys that are not strings."""
    if isinstance(value, dict):
        return not value or any(not isinstance(key, str) or _is_changed(each) for key, each in value.items())
    return isinstance(value, list) and any(map(_is_changed, value))


def join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
