"""Names of parameters that do not change with sharding, compilation or activation checkpointing.

[Note: FQNs are relative to the module that was given]
An FQN is the path from the module that is the function's argument, as in that module's `named_parameters()`: names
start at the model if the argument is the whole model, and at the submodule if it is a submodule. Wrapper modules
(`torch.compile(module)`, activation checkpointing, DDP) do not appear in an FQN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from compile_fsdp.errors import ForeignParameterError
from compile_fsdp.torch_compat.fsdp import FSDPParam, fsdp_state, param_groups, parameter_owners
from compile_fsdp.torch_compat.nn import wrapped_child


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter with all its names and its FSDP2 objects."""

    fqn: str
    """The parameter's first FQN, in the order of the modules."""
    aliases: tuple[str, ...]
    """Further FQNs of the parameter, if modules share it."""
    parameter: nn.Parameter
    """The parameter that an optimizer holds: the sharded one, also while the model is unsharded."""
    managed: FSDPParam | None
    """FSDP2's object for the parameter; None if no `fully_shard` call manages it."""
    group: tuple[str, ...]
    """FQNs of the modules whose FSDP2 group has the parameter; empty if no `fully_shard` call manages it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fqn, *self.aliases)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) for `root` and every module below it, parents first, once for each path.

    See [Note: FQNs are relative to the module that was given].
    """
    fqns: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        if not path:
            fqns[path] = ""
        elif wrapped_child(modules[parent]) == name:
            fqns[path] = fqns[parent]
        else:
            fqns[path] = join(fqns[parent], name)
        modules[path] = module
        yield fqns[path], module


def named_parameters(root: nn.Module) -> list[NamedParameter]:
    """Each parameter below `root` once, in the order of `root.named_parameters()`."""
    modules = list(named_modules(root))
    first_names: dict[nn.Module, str] = {}
    for fqn, module in modules:
        first_names.setdefault(module, fqn)
    managed: dict[tuple[nn.Module, str], tuple[FSDPParam, tuple[str, ...]]] = {}
    for module in first_names:
        state = fsdp_state(module)
        for group in [] if state is None else param_groups(state):
            fqns = tuple(first_names[each] for each in group.modules if each in first_names)
            for fsdp_param in group.fsdp_params:
                managed.update((owner, (fsdp_param, fqns)) for owner in parameter_owners(fsdp_param))

    names: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, tuple[FSDPParam | None, tuple[str, ...]]] = {}
    for fqn, module in modules:
        for name, held in module.named_parameters(recurse=False, remove_duplicate=False):
            manager, group_fqns = managed.get((module, name), (None, ()))
            parameter = held if manager is None else manager.sharded_param
            names.setdefault(parameter, []).append(join(fqn, name))
            owners.setdefault(parameter, (manager, group_fqns))
    return [
        NamedParameter(first, tuple(dict.fromkeys(others)), parameter, *owners[parameter])
        for parameter, (first, *others) in names.items()
    ]


def named_groups(root: nn.Module, optim: torch.optim.Optimizer) -> list[list[NamedParameter]]:
    """The parameters of each of the optimizer's groups, in the optimizer's order.

    Raises:
        ForeignParameterError: the optimizer holds parameters that are not in the model.
    """
    by_parameter = {named.parameter: named for named in named_parameters(root)}
    foreign = [
        f"group {number}, parameter {index}, shape {list(parameter.shape)}"
        for number, group in enumerate(optim.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in by_parameter
    ]
    if foreign:
        raise ForeignParameterError(
            f"expected an optimizer over parameters of {type(root).__name__}, got others: {'; '.join(foreign)}; "
            "make the optimizer after the last fully_shard() call, and pass the module that has all its parameters"
        )
    return [[by_parameter[parameter] for parameter in group["params"]] for group in optim.param_groups]


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
