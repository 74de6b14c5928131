"""Conditions under which a traced graph is right.

Dynamo's guards refer to objects of their process. A `Condition` states a guard in words that every process can compare.
A process that has not traced the graph checks all conditions once. From then on, a `Watch` checks for changes at a
hundredth of the cost.

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
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from compile_fsdp.errors import NotPortableError
from compile_fsdp.passes.analysis.function_text import function_text
from compile_fsdp.replay.paths import STEPS, Paths, Scope
from compile_fsdp.replay.words import (
    PLAIN,
    TORCH_CONSTANTS,
    describe,
    describe_class,
    describe_place,
    forget_classes,
    hash_words,
)
from compile_fsdp.torch_compat.dynamo import GuardFact
from compile_fsdp.torch_compat.dynamo_limits import find_assumed_constant
from compile_fsdp.torch_compat.global_state import GlobalState


class Condition(NamedTuple):
    """A condition on one object."""

    kind: str  # of the guard, such as "TYPE_MATCH"
    position: int  # of the object in the paths
    argument: Any  # of the guard, such as the name of an attribute; None for most kinds
    expected: Any  # result of the kind's function in `_LOOKS`


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
    "TYPE_MATCH": lambda value, _: describe(value) if type(value) in (int, float) else describe_class(type(value)),
    "SEQUENCE_LENGTH": lambda value, _: (describe_class(type(value)), len(value)),
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda value, _: len(value),
    "DICT_KEYS_MATCH": lambda value, _: [
        describe_class(type(value)),
        *(key if type(key) is str else describe(key) for key in value),
    ],
    "DICT_CONTAINS": lambda value, key: key in value,
    "DICT_NOT_CONTAINS": lambda value, key: key in value,
    "HASATTR": lambda value, name: hasattr(value, name),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, name: name in _variables(value),
    "NOT_NONE_MATCH": lambda value, _: value is None,
    "WEAKREF_ALIVE": lambda value, _: value is None,
}
_LOOKS["MAPPING_KEYS_CHECK"] = _LOOKS["DICT_KEYS_MATCH"]

# The keys of torch's hooks, which are numbers that count up in each process.
_HOOK_KEYS = "HOOK_KEYS"
_LOOKS[_HOOK_KEYS] = lambda value, _: [type(key).__name__ for key in value]

# A rank's local tensor of a DTensor, which Dynamo guards in addition to the DTensor. Its sizes differ between ranks if
# shards are uneven. Graphs read padded shards, and do not depend on these sizes.
_LOCAL_TENSOR = "LOCAL_TENSOR"
_LOOKS[_LOCAL_TENSOR] = lambda value, _: (describe_class(type(value)), str(value.dtype), str(value.device))

# This rank's place in a mesh or group that the user's code reads. FSDP2's hooks read no place.
_PLACE = "PLACE"
_MESHES = (DeviceMesh, dist.ProcessGroup)
_LOOKS[_PLACE] = lambda value, _: describe_place(value) if isinstance(value, _MESHES) else None

# A function that makes the contexts of a selective checkpoint: all that it reads decides about the graph.
_CONTEXTS = "CONTEXTS"
_LOOKS[_CONTEXTS] = lambda value, _: hash_words(function_text(value))[:16]

# Methods of C that a module or dict holds, such as `torch.Tensor.tanh`, which Dynamo calls without a guard.
_C_METHODS = "C_METHODS"
_LOOKS[_C_METHODS] = lambda value, _: [
    (describe(name), describe(each))
    for name, each in (value if isinstance(value, dict) else _variables(value)).items()
    if isinstance(each, (MethodDescriptorType, WrapperDescriptorType))
]

# Kinds of guards with an argument.
_ASKS_FOR = {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"}

# Guards that `GlobalState` and `Conditions.pairs` replace. Conditions on the numbers themselves replace SHAPE_ENV.
_COVERED = {
    *("AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "GRAD_MODE"),
    *("TORCH_FUNCTION_STATE", "DUPLICATE_INPUT", "SHAPE_ENV"),
}


class Conditions:
    """All conditions of one graph, on the objects at the paths."""

    def __init__(
        self, guards: Sequence[GuardFact], scope: Scope, state: GlobalState, contexts: Sequence[object] = ()
    ) -> None:
        """Make conditions of Dynamo's guards, while their graph is compiled; `contexts` as of `UntracedCode`.

        NotPortableError for a guard of an unknown kind or step, of an object that does not exist, for a graph that was
        traced under a TorchFunctionMode other than a default device, or for contexts that read unknown objects.
        """
        if state.foreign_mode is not None:
            raise NotPortableError(f"the graph depends on {state.foreign_mode}")
        forget_classes()
        self.paths = Paths()
        looks = [(guard, self.paths.add(guard.name)) for guard in guards if guard.kind not in _COVERED]
        twice = [(guard.name, guard.argument.name) for guard in guards if guard.kind == "DUPLICATE_INPUT"]
        # Pairs of positions that Dynamo guards to be one object, constants included.
        self.pairs = [(self.paths.add(name), self.paths.add(other)) for name, other in twice]
        try:
            values = self.paths.values(scope)
        except (LookupError, AttributeError, TypeError) as error:
            raise NotPortableError(f"the graph depends on a missing object: {error!r}") from error
        if (name := find_assumed_constant(values)) is not None:
            raise NotPortableError(f"the graph may have the result of {name}, which torch does not trace")
        self.conditions: list[Condition] = []
        for guard, position in looks:
            if guard.kind not in _LOOKS:
                raise NotPortableError(f"the graph depends on {guard.name} by a guard of kind {guard.kind}")
            argument = guard.argument if guard.kind in _ASKS_FOR else None
            kind = self._kind(guard.kind, position, values)
            self.conditions.append(Condition(kind, position, argument, _LOOKS[kind](values[position], argument)))
            if isinstance(values[position], _MESHES) and not self._is_of_hooks(position):
                self.conditions.append(Condition(_PLACE, position, None, describe_place(values[position])))
        for position, value in enumerate(values):
            if isinstance(value, (torch.nn.Module, dict)) and (found := _LOOKS[_C_METHODS](value, None)):
                self.conditions.append(Condition(_C_METHODS, position, None, found))
        for made in contexts:
            places = [position for position, value in enumerate(values) if value is made]
            if not places or function_text(made) is None:
                raise NotPortableError(f"{made}, which decides what a checkpoint saves, may read anything")
            look = _LOOKS[_CONTEXTS](made, None)
            self.conditions += [Condition(_CONTEXTS, position, None, look) for position in places]
        self.conditions = list({repr(condition): condition for condition in self.conditions}.values())
        self.same = _first_same(values)  # see [Note: Two paths to one object]
        self.state = state  # before the trace; it must hold again
        self._own: dict[tuple[str, int], Any] | None = self._find_own(values)

    def _kind(self, kind: str, position: int, values: Sequence[Any]) -> str:
        """Return the kind of condition for a guard."""
        access = self.paths.accesses[position]
        if kind == "TENSOR_MATCH" and access.key == "_local_tensor":
            return _LOCAL_TENSOR
        # Dynamo reads the keys in `list(a_dict)`, but guards only their number.
        if kind == "SEQUENCE_LENGTH" and isinstance(values[position], dict):
            kind = "DICT_KEYS_MATCH"
        if kind in ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK") and "_hooks" in str(access.key):
            above = self.paths.accesses[access.parent]
            owner = values[above.parent if above.kind == "variables" else access.parent]
            return _HOOK_KEYS if isinstance(owner, (torch.nn.Module, torch.Tensor)) else kind
        return kind

    def _is_of_hooks(self, position: int) -> bool:
        """Return whether an object is found through FSDP2's hooks or a DTensor."""
        kind, parent, key = self.paths.accesses[position]
        if kind == "root":
            return bool(key == ("L", "state"))
        return key in ("_compile_fsdp_hooks", "_spec", "device_mesh") or self._is_of_hooks(parent)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}

    def problem(self, scope: Scope) -> str | None:
        """Describe the first condition that does not hold; None if all hold."""
        forget_classes()
        if self.state.has_changed():
            return f"torch's global state has changed: {self.state.difference()}"
        try:
            values = self.paths.values(scope)
            for condition in self.conditions:
                if not self.holds(condition, values[condition.position]):
                    return self._difference(condition, values[condition.position])
        except (LookupError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
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

    def _difference(self, condition: Condition, value: Any) -> str:
        found = _LOOKS[condition.kind](value, condition.argument)
        name = self.paths.name(condition.position)
        asked = "" if condition.argument is None else f" ({condition.argument})"
        was = condition.expected if found != condition.expected else "another object"
        return f"{name}{asked} is {found}, and was {was}"

    def holds(self, condition: Condition, value: Any) -> bool:
        if _LOOKS[condition.kind](value, condition.argument) != condition.expected:
            return False
        if self._own is None or condition.kind not in _OWN:
            return True
        return _OWN[condition.kind](value) is self._own[condition.kind, condition.position]

    def _find_own(self, values: Sequence[Any]) -> dict[tuple[str, int], Any]:
        """Return this process's classes and objects. See [Note: Names within a process]."""
        own = [(kind, position) for kind, position, *_ in self.conditions if kind in _OWN]
        return {(kind, position): _OWN[kind](values[position]) for kind, position in own}


def _first_same(values: Sequence[Any]) -> list[int]:
    """Return, by position, the first position of an identical object."""
    first: dict[int, int] = {}
    return [
        position if isinstance(value, _ALWAYS_SAME) else first.setdefault(id(value), position)
        for position, value in enumerate(values)
    ]


# By kind of condition: a function that returns an object that must stay identical within a process.
_OWN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), type),
    "CLASS_MATCH": lambda value: value,
    "ID_MATCH": lambda value: None if isinstance(value, _ALWAYS_SAME) else value,
    # Dynamo compares these by ==, but their description may not tell them apart.
    **dict.fromkeys(
        ("CONSTANT_MATCH", "EQUALS_MATCH"),
        lambda value: None if isinstance(value, (*_ALWAYS_SAME, list, dict, set)) else value,
    ),
}

# Classes whose instances are compared by value: no graph depends on their identity.
_ALWAYS_SAME: tuple[type, ...] = (
    *(*PLAIN, *TORCH_CONSTANTS, tuple, frozenset, type, enum.Enum, Placement),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType, MappingProxyType),
)


class Watch:
    """Detects changes of a graph's dependencies since all conditions held."""

    def __init__(self, conditions: Conditions, scope: Scope, inputs: Collection[str], before: Watch | None) -> None:
        """Remember the objects of a scope in which all conditions hold.

        The objects of the local variables `inputs` change every step. `before` is the previous watch, which failed
        although all conditions held, because some objects were replaced.
        """
        self.conditions = conditions
        accesses = conditions.paths.accesses
        self._values = values = conditions.paths.values(scope)
        # Positions whose object changes every step; their conditions are checked again in each step.
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
        self._contents = _contents([c for c in conditions.conditions if c.position not in self.others], values)
        for i in self.others:
            values[i] = None  # do not keep the object alive
        # By id, positions of the fixed objects, of which no input may become one. See [Note: Two paths to one object].
        self._fixed = {id(values[i]): i for i in reversed(fixed)}
        self._pairs = [pair for pair in conditions.pairs if self.others.intersection(pair)]
        self._in_order = sorted(self.others)
        self._of_others = [c for c in conditions.conditions if c.position in self.others]

    def holds(self, scope: Scope) -> bool:
        """Return whether all conditions still hold."""
        try:
            return (
                not self.conditions.state.has_changed()
                and all(scope[key[0]].get(key[1]) is value for key, value in self._roots)
                and all(all(map(is_, map(step, parents, keys), found)) for step, parents, keys, found in self._steps)
                and all(list(map(look, *given)) == found for look, given, found in self._contents)
                and self._others_hold(scope)
            )
        except (LookupError, AttributeError, TypeError):
            return False

    def _others_hold(self, scope: Scope) -> bool:
        values, same = self.conditions.paths.fill(self._values.copy(), self._in_order, scope), self.conditions.same
        found: dict[int, int] = {}
        for i in self._in_order:
            if not isinstance(values[i], _ALWAYS_SAME):
                key = id(values[i])
                first = self._fixed[key] if key in self._fixed else found.setdefault(key, i)
                if same[i] != (i if first == i else same[first]):
                    return False
        return all(self.conditions.holds(each, values[each.position]) for each in self._of_others) and all(
            values[one] is values[other] for one, other in self._pairs
        )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (isinstance(value, _ALWAYS_SAME) and type(value) is type(other) and value == other)


def _contents(
    conditions: Sequence[Condition], values: Sequence[Any]
) -> list[tuple[Callable[..., Any], Sequence[list[Any]], list[Any]]]:
    """Return functions of mutable properties, such as lengths, with columns of arguments and the present results."""

    def objects(*kinds: str) -> list[Any]:
        return [values[c.position] for c in conditions if c.kind in kinds]

    def arguments(*kinds: str) -> list[Any]:
        return [c.argument for c in conditions if c.kind in kinds]

    functions = [each for each in objects("CLOSURE_MATCH", "FUNCTION_MATCH") if isinstance(each, FunctionType)]
    constants = [each for each in objects("CONSTANT_MATCH", "EQUALS_MATCH") if isinstance(each, (list, set, dict))]
    generic, contained = "NOT_PRESENT_IN_GENERIC_DICT", ("DICT_CONTAINS", "DICT_NOT_CONTAINS")
    columns: list[tuple[Callable[..., Any], Sequence[list[Any]]]] = [
        (len, [objects("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT")]),
        (contains, [list(map(_variables, objects(generic))), arguments(generic)]),
        (contains, [objects(*contained), arguments(*contained)]),
        (type, [objects("TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")]),
        (list, [objects("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", _HOOK_KEYS)]),
        (hasattr, [objects("HASATTR"), arguments("HASATTR")]),
        (attrgetter("__code__"), [functions]),
        (attrgetter("requires_grad", "dtype", "shape", "device"), [objects("TENSOR_MATCH")]),
        (torch.Tensor.stride, [objects("TENSOR_MATCH")]),
        (describe, [constants]),
    ]
    return [(look, given, list(map(look, *given))) for look, given in columns]
