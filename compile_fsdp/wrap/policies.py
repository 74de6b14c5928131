"""Policies: select the modules that become separate groups, and their arguments of `fully_shard`.

`first | second` selects every module that either policy selects. If both select a module, it gets the arguments of
both, and the second policy's value of an argument that both give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from compile_fsdp.errors import PolicyError
from compile_fsdp.wrap.tree import has_forward, has_parameters, names_of

Selection = Mapping[nn.Module, Mapping[str, Any]]


class Policy(Protocol):
    """Decides which modules to shard. A policy only reads the model."""

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        """Choose modules below the root.

        Args:
            root: The model, not sharded yet, possibly on the meta device.
            ignored: The ignored modules and all modules below them, which must not be selected.
            root_kwargs: Arguments of `fully_shard` for the root.
        Returns:
            Arguments of `fully_shard` for each selected module; omitted arguments default to the root's.
        """


class Combinable:
    """Mixin for `policy | policy`; one operand may be any object with a `select` method."""

    __slots__ = ()

    def __or__(self: Policy, other: Policy) -> Combined:
        return Combined(self, other)

    def __ror__(self: Policy, other: Policy) -> Combined:
        return Combined(other, self)


@dataclass(frozen=True, slots=True)
class Combined(Combinable):
    """The policy `first | second`."""

    first: Policy
    second: Policy

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        selected = {module: dict(kwargs) for module, kwargs in self.first.select(root, ignored, root_kwargs).items()}
        for module, kwargs in self.second.select(root, ignored, root_kwargs).items():
            selected.setdefault(module, {}).update(kwargs)
        return selected

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclass(frozen=True, slots=True)
class ModuleWrapPolicy(Combinable):
    """Select every module of the given classes, subclasses included.

    Raises:
        PolicyError: `classes` contains an object that is not a module class.
    """

    classes: Collection[type[nn.Module]]

    def __post_init__(self) -> None:
        if wrong := [each for each in self.classes if not (isinstance(each, type) and issubclass(each, nn.Module))]:
            raise PolicyError(f"expected module classes, got {wrong}; pass the classes themselves, not their names")

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        classes = tuple(self.classes)
        return {module: {} for module in root.modules() if isinstance(module, classes) and module not in ignored}

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(each.__name__ for each in self.classes))}}})"


@dataclass(frozen=True, slots=True)
class CustomPolicy(Combinable):
    """Select the modules for which a function returns True, or a dict of arguments that overrides the root's.

    The function is not called on the root or on ignored modules. `select` raises PolicyError for any other answer.
    """

    function: Callable[[nn.Module], bool | Mapping[str, Any]]

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        skipped = {root, *ignored}
        answers = {module: self.function(module) for module in root.modules() if module not in skipped}
        names = names_of(root)
        if wrong := {names[each]: answer for each, answer in answers.items() if not isinstance(answer, bool | Mapping)}:
            raise PolicyError(f"expected {self!r} to return True, False or a dict of arguments, got {wrong}")
        selected = {module: answer for module, answer in answers.items() if answer is not False}
        return {module: answer if isinstance(answer, Mapping) else {} for module, answer in selected.items()}

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self.function, '__qualname__', repr(self.function))})"


@dataclass(frozen=True, slots=True)
class SizePolicy(Combinable):
    """Select, from the leaves upwards, each module with enough parameters outside the modules selected below it.

    Args:
        min_params: Smallest number of parameter elements in a group.
        exclude: Classes of modules that are not selected. Modules below them may be selected.
        leaves: Classes of modules that read their submodules' parameters, so no module below them is selected.
    """

    min_params: int
    exclude: tuple[type[nn.Module], ...] = ()
    leaves: tuple[type[nn.Module], ...] = field(default=(nn.MultiheadAttention,), repr=False)

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        selected: dict[nn.Module, dict[str, Any]] = {}
        seen = {root, *ignored}
        counted = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
        counted.update(root_kwargs.get("ignored_params") or ())

        def unwrapped_numel(module: nn.Module, is_open: bool) -> int:
            """Count the parameter elements of a module that no selected module holds, each parameter once."""
            own = [parameter for parameter in module.parameters(recurse=False) if parameter not in counted]
            counted.update(own)
            numel = sum(parameter.numel() for parameter in own)
            children = [child for child in dict.fromkeys(module.children()) if child not in seen]
            seen.update(children)
            numel += sum(unwrapped_numel(child, is_open and not isinstance(module, self.leaves)) for child in children)
            is_candidate = is_open and module is not root and not isinstance(module, self.exclude)
            if is_candidate and numel >= self.min_params and has_forward(module):
                selected[module] = {}
                return 0
            return numel

        unwrapped_numel(root, True)
        return selected


@dataclass(frozen=True, slots=True)
class RepeatedBlocksPolicy(Combinable):
    """Select the outermost modules of repeated classes, such as a transformer's layers.

    A class is repeated if `ModuleList`s, `ModuleDict`s or `Sequential`s contain at least two of its modules. If any
    repeated class has submodules with parameters, repeated classes without such submodules do not count.
    """

    def select(self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]) -> Selection:
        classes = self.block_classes(root)
        selected: dict[nn.Module, dict[str, Any]] = {}
        seen = {root, *ignored}

        def visit(module: nn.Module) -> None:
            for child in module.children():
                if child not in seen:
                    seen.add(child)
                    if type(child) in classes:
                        selected[child] = {}
                    else:
                        visit(child)

        visit(root)
        return selected

    def block_classes(self, root: nn.Module) -> list[type[nn.Module]]:
        """The repeated classes of a model, in the order of their first modules."""
        containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        in_containers = {
            child: None
            for module in root.modules()
            if isinstance(module, containers)
            for child in module.children()
            if type(child) not in containers and has_forward(child) and has_parameters(child)
        }
        counts = Counter(type(module) for module in in_containers)
        repeated = [cls for cls, count in counts.items() if count > 1]
        composite = {type(module) for module in in_containers if any(map(has_parameters, module.children()))}
        return [cls for cls in repeated if cls in composite] or repeated
