"""Declare the supported releases of torch and its private names that this folder needs. Does not import torch.

If a file imports or reads a name at module level, its import fails when the name is gone. Every other name is declared
beside the code that uses it, and `required.py` looks it up.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

OLDEST, NEWEST = (2, 11), (2, 15)

NAMES: list[str] = []
"""Full names that this folder imports, or looks up, only when they are used."""

ATTRIBUTES: dict[type, tuple[str, ...]] = {}
"""By class of torch, what this package reads and writes of its objects."""


def check_version(version: str) -> None:
    """Raise ImportError for a version that is older than `OLDEST` or newer than `NEWEST`."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        (oldest, newest), (major, minor) = (f"{a}.{b}" for a, b in (OLDEST, NEWEST)), NEWEST
        raise ImportError(
            f"compile_fsdp works with torch {oldest} to {newest}, found torch {version}; install one of these, with "
            f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
        )


def needs(*names: str) -> Callable[[_Function], _Function]:
    """Declare the names, such as "torch._C._current_graph_task_id", that a function uses when called.

    The decorator returns the function itself, so calls cost nothing more and Dynamo traces no wrapper.
    """
    NAMES.extend(names)
    return lambda function: function


def needs_attributes(cls: type, *names: str) -> None:
    """Declare attributes of a class's objects, defined by the class or set by one of its methods."""
    ATTRIBUTES[cls] = (*ATTRIBUTES.get(cls, ()), *names)


class Late:
    """A declared name that is looked up at each use, because the import of its module takes long."""

    def __init__(self, name: str) -> None:
        NAMES.append(name)
        self.name = name

    @property
    def value(self) -> Any:
        return resolve_name(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)
