"""How the files of this folder declare which private names of torch they need.

A name that a file imports, or looks up, at module level is declared by that: the import fails without it. The others
are declared beside the code that uses them, and `required.py` looks them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

NAMES: list[str] = []
"""Full names that functions of this folder import, or look up, when they are called."""

ATTRIBUTES: dict[type, tuple[str, ...]] = {}
"""By class of torch, what this package reads and writes of its objects."""


def needs(*names: str) -> Callable[[_Function], _Function]:
    """Declare the names, such as "torch._C._current_graph_task_id", that a function uses when it is called.

    The function itself stays as it is: a call costs nothing more, and Dynamo traces it as before.
    """
    NAMES.extend(names)
    return lambda function: function


def needs_attributes(cls: type, *names: str) -> None:
    """Declare attributes that every object of a class has, by the class or because one of its methods sets them."""
    ATTRIBUTES[cls] = (*ATTRIBUTES.get(cls, ()), *names)
