"""Conditions under which a traced graph is right.

Dynamo's guards state the dependencies of a graph, but refer to objects of their process. A `Condition` states a guard
in words that every process can compare. `Conditions.problem` checks all conditions once, in a process that has not
traced the graph. From then on, a `Watch` checks for changes at a hundredth of the cost.

[Note: Names within a process]
Two classes of a process may have equal names. A result computed at trace time depends on the whole object, not only on
the attributes that the graph reads. So once the conditions hold in a process, they require its classes and objects from
then on, as Dynamo's guards do.

[Note: Two paths to one object]
If two paths lead to one object, Dynamo makes one variable of it, and guards this only if the object is an input of the
graph. So the conditions also store which paths led to one object when the graph was traced.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, contains, is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from compile_fsdp.errors import NotPortableError
from compile_fsdp.replay.paths import STEPS, Paths, Scope
from compile_fsdp.replay.words import class_name, describe
from compile_fsdp.torch_compat.dynamo import GuardFact
from compile_fsdp.torch_compat.global_state import GlobalState


class Condition(NamedTuple):
    """A condition on one object.

    Attributes:
        kind: Kind of guard, such as "TYPE_MATCH".
        position: Position of the object in the paths.
        argument: Argument of the guard, such as the name of an attribute; None for most kinds.
        expected: Result of the kind's function in `_LOOKS`.
    """

    kind: str
    position: int
    argument: Any
    expected: Any


def _variables(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


# By kind of guard: a function that describes the guarded property in words.
_LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(
        (
            *("BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "FUNCTION_MATCH"),
            *("ID_MATCH", "MODULE_MATCH", "TENSOR_MATCH", "BOOL_MATCH", "NONE_MATCH"),
            *("DTENSOR_SPEC_MATCH", "FAKE_SCRIPT_TYPE_MATCH", "OPAQUE_OBJ_GUARD_FN_MATCH"),
        ),
        lambda value, _: describe(value),
    ),
    # Include the value of a number, because Dynamo may guard only its class here, and its relations by SHAPE_ENV.
    "TYPE_MATCH": lambda value, _: describe(value) if type(value) in (int, float) else class_name(type(value)),
    "SEQUENCE_LENGTH": lambda value, _: len(value),
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda value, _: len(value),
    # Describe keys that are no strings by class, because the keys of hooks are numbers that count up in each process.
    "DICT_KEYS_MATCH": lambda value, _: [key if isinstance(key, str) else class_name(type(key)) for key in value],
    "DICT_CONTAINS": lambda value, key: key in value,
    "DICT_NOT_CONTAINS": lambda value, key: key in value,
    "HASATTR": lambda value, name: hasattr(value, name),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, name: name in _variables(value),
    "NOT_NONE_MATCH": lambda value, _: value is None,
    "WEAKREF_ALIVE": lambda value, _: value is None,
}
_LOOKS["MAPPING_KEYS_CHECK"] = _LOOKS["DICT_KEYS_MATCH"]

# A rank's local tensor of a DTensor, which Dynamo guards in addition to the DTensor. Its sizes differ between ranks if
# shards are uneven. Graphs read padded shards, and do not depend on these sizes.
_LOCAL_TENSOR = "LOCAL_TENSOR"
_LOOKS[_LOCAL_TENSOR] = lambda value, _: (class_name(type(value)), str(value.dtype), str(value.device))

# Kinds of guards with an argument.
_ASKS_FOR = {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"}

# Guards that `GlobalState` and `Conditions.pairs` replace. Conditions on the numbers themselves replace SHAPE_ENV.
_COVERED = {
    *("AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "GRAD_MODE"),
    *("TORCH_FUNCTION_STATE", "DUPLICATE_INPUT", "SHAPE_ENV"),
}


class Conditions:
    """All conditions of one graph.

    Attributes:
        paths: Paths to the objects that the graph depends on.
        conditions: Conditions on these objects.
        pairs: Pairs of positions that Dynamo guards to be one object, constants included.
        same: By position: the first position of an identical object; see [Note: Two paths to one object].
        state: torch's global state before the trace, which must hold again.
    """

    def __init__(self, guards: Sequence[GuardFact], scope: Scope, state: GlobalState) -> None:
        """Make conditions of Dynamo's guards, while their graph is compiled.

        Args:
            guards: The guards.
            scope: Variables of the traced frame.
            state: torch's global state before the trace.
        Raises:
            NotPortableError: a guard has an unknown kind or step, or its object does not exist.
        """
        self.paths = Paths()
        looks = [(guard, self.paths.add(guard.name)) for guard in guards if guard.kind not in _COVERED]
        twice = [(guard.name, guard.argument.name) for guard in guards if guard.kind == "DUPLICATE_INPUT"]
        self.pairs = [(self.paths.add(name), self.paths.add(other)) for name, other in twice]
        try:
            values = self.paths.values(scope)
        except (LookupError, AttributeError, TypeError) as error:
            raise NotPortableError(f"the graph depends on a missing object: {error!r}") from error
        self.conditions: list[Condition] = []
        for guard, position in looks:
            if guard.kind not in _LOOKS:
                raise NotPortableError(f"the graph depends on {guard.name} by a guard of kind {guard.kind}")
            argument = guard.argument if guard.kind in _ASKS_FOR else None
            kind = guard.kind
            if kind == "TENSOR_MATCH" and self.paths.accesses[position].key == "_local_tensor":
                kind = _LOCAL_TENSOR
            expected = _LOOKS[kind](values[position], argument)
            self.conditions.append(Condition(kind, position, argument, expected))
        self.conditions = list({repr(condition): condition for condition in self.conditions}.values())
        self.same = _first_same(values)
        self.state = state
        self._own: dict[tuple[str, int], Any] | None = self._find_own(values)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}

    def problem(self, scope: Scope) -> str | None:
        """Describe the first condition that does not hold; None if all hold."""
        if self.state.has_changed():
            return f"torch's global state has changed: {self.state.difference()}"
        try:
            values = self.paths.values(scope)
        except (LookupError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        for condition in self.conditions:
            if not self.holds(condition, values[condition.position]):
                found = _LOOKS[condition.kind](values[condition.position], condition.argument)
                name = self.paths.name(condition.position)
                asked = "" if condition.argument is None else f" ({condition.argument})"
                was = condition.expected if found != condition.expected else "another object"
                return f"{name}{asked} is {found}, and was {was}"
        for one, other in self.pairs:
            if values[one] is not values[other]:
                return f"{self.paths.name(one)} is not the same object as {self.paths.name(other)}"
        for position, (found, was) in enumerate(zip(_first_same(values), self.same, strict=True)):
            if found != was:
                other = was if was != position else found
                how = "is not" if was != position else "is"
                return f"{self.paths.name(position)} {how} the same object as {self.paths.name(other)}"
        if self._own is None:
            self._own = self._find_own(values)
        return None

    def holds(self, condition: Condition, value: Any) -> bool:
        """Return whether a condition holds for an object."""
        if _LOOKS[condition.kind](value, condition.argument) != condition.expected:
            return False
        if self._own is None or condition.kind not in _OWN:
            return True
        return _OWN[condition.kind](value) is self._own[condition.kind, condition.position]

    def _find_own(self, values: Sequence[Any]) -> dict[tuple[str, int], Any]:
        """Return this process's classes and objects, by kind and position.

        See [Note: Names within a process].
        """
        own = [(kind, position) for kind, position, *_ in self.conditions if kind in _OWN]
        return {(kind, position): _OWN[kind](values[position]) for kind, position in own}


def _first_same(values: Sequence[Any]) -> list[int]:
    first: dict[int, int] = {}
    return [
        position if isinstance(value, _ALWAYS_SAME) else first.setdefault(id(value), position)
        for position, value in enumerate(values)
    ]


# By kind of condition: a function that returns an object that must stay identical within a process.
_OWN: dict[str, Callable[[Any], Any]] = {
    "TYPE_MATCH": type,
    "CLASS_MATCH": lambda value: value,
    "ID_MATCH": lambda value: None if isinstance(value, _ALWAYS_SAME) else value,
}

# Classes whose instances are compared by value: no graph depends on their identity.
_ALWAYS_SAME: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type, enum.Enum),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType, MappingProxyType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Watch:
    """Detects changes of a graph's dependencies since all conditions held.

    Attributes:
        conditions: The conditions.
        others: Positions whose object changes every step; their conditions are checked again in each step.
    """

    def __init__(self, conditions: Conditions, scope: Scope, inputs: Collection[str], before: Watch | None) -> None:
        """Remember the objects of a scope in which all conditions hold.

        Args:
            conditions: The conditions.
            scope: Variables of the frame.
            inputs: Names of local variables whose object changes every step.
            before: The previous watch, which failed although all conditions held, because some objects were replaced;
                None for the first watch.
        """
        self.conditions = conditions
        accesses = conditions.paths.accesses
        self._values = values = conditions.paths.values(scope)
        self.others: set[int] = set() if before is None else set(before.others)
        for i, (kind, parent, key) in enumerate(accesses):
            is_input = kind == "root" and key[0] == "L" and key[1] in inputs
            is_other = before is not None and i not in before.others and not _is_same(values[i], before._values[i])
            if is_input or parent in self.others or (is_other and kind != "variables"):
                self.others.add(i)
        fixed = [i for i in range(len(accesses)) if i not in self.others]
        self._roots = [(accesses[i].key, values[i]) for i in fixed if accesses[i].kind == "root"]
        self._steps: list[tuple[Any, list[Any], list[Any], list[Any]]] = []
        for kind in STEPS:
            if chosen := [i for i in fixed if accesses[i].kind == kind and kind != "variables"]:
                parents, keys = [values[accesses[i].parent] for i in chosen], [accesses[i].key for i in chosen]
                self._steps.append((STEPS[kind], parents, keys, [values[i] for i in chosen]))
        self._contents = _Contents([c for c in conditions.conditions if c.position not in self.others], values)
        for i in self.others:
            values[i] = None  # do not keep the object alive
        self._pairs = [pair for pair in conditions.pairs if self.others.intersection(pair)]
        self._of_others = [c for c in conditions.conditions if c.position in self.others]

    def holds(self, scope: Scope) -> bool:
        """Return whether all conditions still hold."""
        try:
            return (
                not self.conditions.state.has_changed()
                and all(scope[key[0]].get(key[1]) is value for key, value in self._roots)
                and all(all(map(is_, map(step, parents, keys), found)) for step, parents, keys, found in self._steps)
                and self._contents.hold()
                and self._others_hold(scope)
            )
        except (LookupError, AttributeError, TypeError):
            return False

    def _others_hold(self, scope: Scope) -> bool:
        found: dict[int, Any] = {}
        accesses = self.conditions.paths.accesses

        def value(position: int) -> Any:
            if position not in self.others:
                return self._values[position]
            if position not in found:
                kind, parent, key = accesses[position]
                found[position] = scope[key[0]][key[1]] if kind == "root" else STEPS[kind](value(parent), key)
            return found[position]

        return all(self.conditions.holds(each, value(each.position)) for each in self._of_others) and all(
            value(one) is value(other) for one, other in self._pairs
        )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (isinstance(value, _ALWAYS_SAME) and type(value) is type(other) and value == other)


class _Contents:
    """Mutable properties of objects: lengths, keys, attributes, sizes of a tensor.

    Attributes:
        looks: For each property: a function, the columns of its arguments, and its results by row.
    """

    def __init__(self, conditions: Sequence[Condition], values: Sequence[Any]) -> None:
        def of(*kinds: str) -> tuple[list[Any], list[Any]]:
            chosen = [c for c in conditions if c.kind in kinds]
            return [values[c.position] for c in chosen], [c.argument for c in chosen]

        sized, _ = of("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT")
        objects, names = of("NOT_PRESENT_IN_GENERIC_DICT")
        containers, keys = of("DICT_CONTAINS", "DICT_NOT_CONTAINS")
        typed, _ = of("TYPE_MATCH")
        keyed, _ = of("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
        functions, _ = of("CLOSURE_MATCH", "FUNCTION_MATCH")
        tensors, _ = of("TENSOR_MATCH")
        constants, _ = of("CONSTANT_MATCH", "EQUALS_MATCH")
        columns: list[tuple[Callable[..., Any], tuple[list[Any], ...]]] = [
            (len, (sized,)),
            (contains, ([*map(_variables, objects), *containers], [*names, *keys])),
            (type, (typed,)),
            (list, (keyed,)),
            (hasattr, of("HASATTR")),
            (attrgetter("__code__"), ([each for each in functions if isinstance(each, FunctionType)],)),
            (attrgetter("requires_grad", "dtype", "shape", "device"), (tensors,)),
            (torch.Tensor.stride, (tensors,)),
            (describe, ([each for each in constants if isinstance(each, (list, set, dict))],)),
        ]
        self.looks = [(look, given, list(map(look, *given))) for look, given in columns]

    def hold(self) -> bool:
        """Return whether all properties are unchanged."""
        return all(list(map(look, *given)) == found for look, given, found in self.looks)
