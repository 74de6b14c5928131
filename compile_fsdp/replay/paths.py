"""Paths to the objects that a graph depends on, by Dynamo's expressions.

Dynamo names each guarded object by a Python expression, such as `L['self']._modules['0'].training`: `L` has the local
variables of the traced frame, `G` its globals. The expressions of a graph share most of their prefixes, so they are
kept as one table of steps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any, NamedTuple

from compile_fsdp.errors import NotPortableError

# The local variables as "L", the globals as "G".
Scope = Mapping[str, Mapping[str, Any]]


class Access(NamedTuple):
    """One step on a path to an object."""

    kind: str  # "root" for a variable, or a key of `STEPS`
    parent: int  # position in the table of the object from which the step starts; -1 for a root
    key: Any  # name, index or position; scope and name for a root; None for kinds without a key


# By kind of step: a function of the parent object and the key.
STEPS: dict[str, Any] = {
    "attribute": getattr,
    "item": getitem,
    "key": lambda mapping, position: list(mapping)[position],
    "value": lambda mapping, position: list(mapping.values())[position],
    "type": lambda value, _: type(value),
    "variables": lambda value, _: vars(value),
    "call": lambda value, _: value(),  # of a weak reference
}

_TEXTS = {"attribute": ".{}", "item": "[{!r}]", "key": ".keys()[{}]", "value": ".values()[{}]", "call": "()"}


class Paths:
    def __init__(self) -> None:
        self.accesses: list[Access] = []  # each after its parent
        self._positions: dict[Access, int] = {}

    def add(self, expression: str) -> int:
        """Add an expression; return the position of its object. NotPortableError for an unknown kind of step."""
        return self._add(ast.parse(expression, mode="eval").body, expression)

    def values(self, scope: Scope) -> list[Any]:
        """Return all objects of the table; LookupError, AttributeError or TypeError if one does not exist."""
        return self.fill([None] * len(self.accesses), range(len(self.accesses)), scope)

    def fill(self, values: list[Any], positions: Iterable[int], scope: Scope) -> list[Any]:
        """Set the objects at some positions, in rising order, among the objects of the table; raises as `values`."""
        for i in positions:
            kind, parent, key = self.accesses[i]
            values[i] = scope[key[0]][key[1]] if kind == "root" else STEPS[kind](values[parent], key)
        return values

    def name(self, position: int) -> str:
        """Return the expression of an object, for messages."""
        kind, parent, key = self.accesses[position]
        if kind == "root":
            return str(key[1])
        return self.name(parent) + _TEXTS.get(kind, f".{kind}").format(key)

    def _add(self, node: ast.expr, whole: str) -> int:
        match node:
            case ast.Subscript(ast.Name("L" | "G" as scope), ast.Constant(str(name))):
                return self._position(Access("root", -1, (scope, name)))
            case ast.Subscript(ast.Call(ast.Name("list"), [ast.Call(ast.Attribute(ast.Name("dict"), "keys"), [of])])):
                return self._position(Access("key", self._add(of, whole), ast.literal_eval(node.slice)))
            case ast.Subscript(value, ast.Subscript(ast.Call(ast.Name("list")), ast.Constant(int(position)))):
                return self._position(Access("value", self._add(value, whole), position))
            case ast.Subscript(value, ast.Constant() | ast.UnaryOp()):
                return self._position(Access("item", self._add(value, whole), ast.literal_eval(node.slice)))
            case ast.Attribute(value, "__dict__"):
                return self._position(Access("variables", self._add(value, whole), None))
            case ast.Attribute(value, name):
                return self._position(Access("attribute", self._add(value, whole), name))
            case ast.Call(ast.Name("type"), [value]):
                return self._position(Access("type", self._add(value, whole), None))
            case ast.Call(ast.Name("dict"), [value]):  # a copy that is only read
                return self._add(value, whole)
            case ast.Call(value, []):
                return self._position(Access("call", self._add(value, whole), None))
        raise NotPortableError(f"the graph depends on {whole}")

    def _position(self, access: Access) -> int:
        if access not in self._positions:
            self._positions[access] = len(self.accesses)
            self.accesses.append(access)
        return self._positions[access]
