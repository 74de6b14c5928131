"""The modules of a model: names, and whether they have a forward or parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

ROOT = "the root"


def has_forward(module: nn.Module) -> bool:
    """Whether a call of the module runs a forward, and so FSDP2's hooks."""
    if type(module).forward is not nn.Module.forward:
        return True
    # torch's fully_shard refuses ModuleList and ModuleDict even if an instance has a forward.
    return "forward" in vars(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def names_of(root: nn.Module) -> dict[nn.Module, str]:
    """The first FQN of each module, in pre-order; `ROOT` for the root itself."""
    return {module: fqn or ROOT for fqn, module in root.named_modules()}


def below(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules strictly below any of `modules`."""
    return {each for module in modules for each in module.modules() if each is not module}


def with_all_below(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {each for module in modules for each in module.modules()}
