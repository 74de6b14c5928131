"""`apply` and `auto_shard`: make the `fully_shard` calls of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.api import fully_shard
from compile_fsdp.errors import MixedFrozenWarning
from compile_fsdp.wrap.build_plan import plan
from compile_fsdp.wrap.checks import check_modules, check_process_group
from compile_fsdp.wrap.plans import Plan
from compile_fsdp.wrap.policies import Policy
from compile_fsdp.wrap.precision import run_in_full_precision

Model = TypeVar("Model", bound=nn.Module)


def apply(plan: Plan) -> nn.Module:
    """Shard a model as planned with `compile_fsdp.fully_shard`, children before parents, the root last.

    Warns:
        MixedFrozenWarning: a group has both trainable and frozen parameters.
    Returns:
        The plan's root.
    Raises:
        AlreadyShardedError: a module was sharded after the plan was made, by this plan or otherwise.
        ProcessGroupMissingError: a group has no mesh, and there is no process group to build one from.
    """
    check_modules(plan.root, [module for group in plan.groups for module in group.modules])
    check_process_group(group.kwargs for group in plan.groups)
    for warning in plan.warnings:
        warnings.warn(warning, MixedFrozenWarning, stacklevel=2)
    for module in plan.full_precision:
        run_in_full_precision(module)
    for group in plan.groups:
        fully_shard(group.modules[0] if len(group.modules) == 1 else list(group.modules), **group.kwargs)
    return plan.root


def auto_shard(
    model: Model,
    policy: Policy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    mixed_precision_overrides: Iterable[type[nn.Module]] = (),
    fix_shared: bool = False,
    **root_kwargs: Any,
) -> Model:
    """Shard a model by a policy: `apply(plan(...))`, with `plan`'s arguments and the errors of both functions.

    Returns:
        `model` itself, sharded and ready to be compiled.
    """
    apply(
        plan(
            model,
            policy,
            mesh=mesh,
            ignored_modules=ignored_modules,
            mixed_precision_overrides=mixed_precision_overrides,
            fix_shared=fix_shared,
            **root_kwargs,
        )
    )
    return model
