"""`plan`, `apply` and `auto_shard`: select modules by a policy, check them, and make the `fully_shard` calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.api import check_process_group, fully_shard
from compile_fsdp.errors import MixedFrozenWarning
from compile_fsdp.wrap import checks
from compile_fsdp.wrap.groups import Draft, Group, Plan, collect_all, in_order, merge_shared
from compile_fsdp.wrap.layout import shard_bytes
from compile_fsdp.wrap.policies import Policy, RepeatedBlocksPolicy, Selection
from compile_fsdp.wrap.precision import run_in_full_precision
from compile_fsdp.wrap.tree import has_parameters, with_all_below

Model = TypeVar("Model", bound=nn.Module)


def plan(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    mixed_precision_overrides: Iterable[type[nn.Module]] = (),
    fix_shared: bool = False,
    **root_kwargs: Any,
) -> Plan:
    """Decide which modules to shard, without changing the model. All ranks get equal plans, without communication.

    Args:
        model: The outermost module, on any device, meta included; it becomes the root.
        policy: Selects the modules that become separate groups; `RepeatedBlocksPolicy()` by default.
        mesh: The mesh to shard over; by default all ranks, as in `fully_shard`.
        ignored_modules: Modules to leave unsharded, together with all modules below them.
        mixed_precision_overrides: Classes of modules that compute in float32 in any model. Each such module is a group
            without `param_dtype`, and casts 16-bit inputs to float32 and outputs to the first input's dtype.
        fix_shared: Whether to merge groups that share parameters, instead of raising an error.
        **root_kwargs: Arguments of `fully_shard` for the root, and for every group unless the policy overrides them.
    Returns:
        The plan. `print` shows it as a table, and `apply` executes it.
    Raises:
        PlanError: the plan cannot be applied; the subclass says why.
        FSDP1Error: the model contains FullyShardedDataParallel modules.
    """
    policy = RepeatedBlocksPolicy() if policy is None else policy
    ignored_modules = list(ignored_modules)
    checks.check_ignored(model, ignored_modules)
    ignored = with_all_below(ignored_modules)
    if mesh is not None:
        root_kwargs["mesh"] = mesh
    selection = policy.select(model, ignored, root_kwargs)
    checks.check_selection(model, policy, selection, ignored)
    classes = tuple(mixed_precision_overrides)
    overridden = [module for module in model.modules() if isinstance(module, classes) and module not in ignored]
    checks.check_full_precision(model, overridden)
    ignored_params = {parameter for module in ignored_modules for parameter in module.parameters()}
    drafts = _draft(model, selection, root_kwargs, ignored_params, overridden)
    checks.check_modules(model, [draft.modules[0] for draft in drafts])
    checks.check_arguments(drafts)
    if fix_shared:
        drafts = merge_shared(model, drafts)
    checks.check_shared(model, drafts)
    checks.check_parameters(model, drafts)
    drafts = in_order(model, drafts)
    return Plan(model, tuple(_groups(model, drafts)), tuple(overridden), tuple(checks.frozen_warnings(drafts)))


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
    checks.check_modules(plan.root, [module for group in plan.groups for module in group.modules])
    for group in plan.groups:
        check_process_group(group.modules, group.kwargs)
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
    """Shard a model by a policy and return it: `apply(plan(...))`, with `plan`'s arguments and the errors of both."""
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


def _draft(
    root: nn.Module,
    selection: Selection,
    root_kwargs: Mapping[str, Any],
    ignored_params: set[nn.Parameter],
    overridden: list[nn.Module],
) -> list[Draft]:
    in_full_precision = with_all_below(overridden)
    fqns = {module: fqn for fqn, module in root.named_modules()}
    drafts = []
    for module in {**selection, **dict.fromkeys(filter(has_parameters, overridden)), root: None}:
        kwargs = {**root_kwargs, **selection.get(module, {})}
        # fully_shard accepts ignored parameters, but not ignored modules.
        if own_ignored := ignored_params | set(kwargs.get("ignored_params") or ()):
            kwargs["ignored_params"] = own_ignored
        if module in in_full_precision:
            kwargs["mp_policy"] = MixedPrecisionPolicy()
        drafts.append(Draft((module,), (fqns[module],), kwargs))
    return drafts


def _groups(root: nn.Module, drafts: list[Draft]) -> Iterable[Group]:
    fqns = {parameter: fqn for fqn, parameter in root.named_parameters()}
    for draft, parameters in collect_all(drafts).items():
        yield Group(
            modules=draft.modules,
            fqns=draft.fqns,
            kwargs=draft.kwargs,
            parameters=tuple(fqns[parameter] for parameter in parameters),
            numel=sum(parameter.numel() for parameter in parameters),
            bytes_per_rank=sum(shard_bytes(parameter, draft.kwargs) for parameter in parameters),
        )
