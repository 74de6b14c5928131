"""Dynamo's code in place of a traced frame, in a form for all processes."""

from __future__ import annotations

import builtins
import dis
import importlib
import marshal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from compile_fsdp.errors import NotPortableError
from compile_fsdp.replay.words import class_name

# Prefix of the compiled graph's name in Dynamo's code.
_GRAPH = "__compiled_fn_"
# Prefix of the name for a function's globals if they are a copy of its module's globals, since torch 2.15.
_GLOBALS = "___unnamed_scope"


@dataclass(frozen=True, slots=True)
class Program:
    """Code, with a description of its globals."""

    code: bytes  # marshalled
    # By name, the kind and description of each global: ("graph", None), ("builtins", None), ("module", name),
    # ("globals", name of their module), ("object", (module, qualified name)) or ("value", value).
    variables: Mapping[str, tuple[str, Any]]

    @classmethod
    def record(cls, code: CodeType, variables: Mapping[str, Any], also: Iterable[str]) -> Program:
        """Describe code that Dynamo has generated, and the globals that it or `also` names.

        Raises:
            NotPortableError: a global, or a constant of the code, exists in this process only.
        """
        used = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"} | set(also)
        described = {name: _describe(name, variables[name]) for name in sorted(used) if name in variables}
        try:
            return cls(marshal.dumps(code), described)
        except ValueError as error:
            raise NotPortableError(f"the compiled code has a constant that is an object: {error}") from error

    def bind(self, graph: Callable[..., Any], closure: tuple[CellType, ...] | None) -> FunctionType:
        """Return the code as a function of the traced frame's arguments, with a compiled graph in its globals."""
        found = {name: graph if kind == "graph" else _find(kind, what) for name, (kind, what) in self.variables.items()}
        return FunctionType(marshal.loads(self.code), {"__builtins__": builtins, **found}, closure=closure)


def _describe(name: str, value: Any) -> tuple[str, Any]:
    if name.startswith(_GRAPH):
        return "graph", None
    if value is vars(builtins):
        return "builtins", None
    if isinstance(value, ModuleType):
        return "module", value.__name__
    if name.startswith(_GLOBALS):
        return "globals", value["__name__"]
    if isinstance(value, (type, FunctionType)):
        where = (value.__module__, value.__qualname__)
        if "<locals>" not in value.__qualname__ and _find("object", where) is value:
            return "object", where
    if _is_plain(value):
        return "value", value
    raise NotPortableError(f"the compiled code uses {name}, an object of class {class_name(type(value))}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (type(None), bool, int, float, str))


def _find(kind: str, what: Any) -> Any:
    if kind == "builtins":
        return vars(builtins)
    if kind == "module":
        return importlib.import_module(what)
    if kind == "globals":
        return dict(vars(importlib.import_module(what)))  # a copy, as for the traced function
    if kind == "object":
        module, qualname = what
        return attrgetter(qualname)(importlib.import_module(module))
    return what
