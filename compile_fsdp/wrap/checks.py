"""Check a plan before the model changes; errors name all offending FQNs and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from compile_fsdp.errors import (
    AlreadyShardedError,
    FSDP1Error,
    IgnoredModuleError,
    NoForwardError,
    NothingSelectedError,
    PolicyError,
    PrecisionOverrideError,
    SharedParameterError,
    UnshardableParameterError,
)
from compile_fsdp.torch_compat.fsdp import fsdp_state
from compile_fsdp.wrap.groups import Draft, collect_all, find_shared, merge_shared
from compile_fsdp.wrap.layout import local_shape, shard_count, shard_of, unsharded_bytes
from compile_fsdp.wrap.policies import Policy, Selection
from compile_fsdp.wrap.tree import has_forward, has_parameters, names_of, with_all_below


def check_ignored(root: nn.Module, ignored_modules: Collection[nn.Module]) -> None:
    names = names_of(root)
    if foreign := [type(module).__name__ for module in ignored_modules if module not in names or module is root]:
        raise IgnoredModuleError(f"expected ignored modules below {type(root).__name__}, got {foreign}; leave them out")


def check_selection(root: nn.Module, policy: Policy, selection: Selection, ignored: Collection[nn.Module]) -> None:
    """Refuse modules outside the model, ignored modules, and a selection without a module below the root."""
    names = names_of(root)
    # A policy is user code and may return anything, despite its annotations.
    if foreign := [repr(module) for module in selection if module not in names]:
        raise PolicyError(
            f"expected {policy!r} to select modules of {type(root).__name__}, got {', '.join(foreign)}; "
            "select modules that root.modules() yields"
        )
    if inside := [names[module] for module in selection if module in ignored]:
        raise IgnoredModuleError(
            f"expected {policy!r} to leave out ignored modules, it selects {inside}, which are ignored or below an "
            "ignored module; take them out of the policy, or their parents out of ignored_modules"
        )
    if not selection.keys() - {root}:
        useful = (module for module in names if module is not root and has_parameters(module) and has_forward(module))
        classes = sorted({type(module).__name__ for module in useful})
        raise NothingSelectedError(
            f"expected {policy!r} to select modules below {type(root).__name__}, it selects none; name some of its "
            f"classes, {classes}, in a ModuleWrapPolicy, or call fully_shard() on the whole"
        )


def check_modules(root: nn.Module, modules: Collection[nn.Module]) -> None:
    """Check that a model has no FSDP1 modules, and that the given modules are not sharded yet and have a forward."""
    names = names_of(root)
    if fsdp1 := [fqn for module, fqn in names.items() if isinstance(module, FullyShardedDataParallel)]:
        raise FSDP1Error(f"expected a model without FSDP1, got FullyShardedDataParallel at {fsdp1}; build it without")
    sharded_below = with_all_below(module for module in names if fsdp_state(module) is not None)
    if sharded := [names[module] for module in modules if module in sharded_below]:
        raise AlreadyShardedError(
            f"expected modules that are not sharded yet, got {sharded}; plan before any fully_shard(), "
            "or pass modules that are sharded by hand as ignored_modules"
        )
    if passive := {names[module]: type(module).__name__ for module in modules if not has_forward(module)}:
        raise NoForwardError(
            f"expected modules that are called, got {passive}, which have no forward; select what they contain, "
            "or the module around them"
        )


def check_arguments(drafts: Iterable[Draft]) -> None:
    """Refuse arguments that `fully_shard` would refuse only after part of the model is sharded."""
    known = [name for name in inspect.signature(fully_shard).parameters if name != "module"]
    wrong: dict[str, list[str]] = {}
    for draft in drafts:
        kwargs = draft.kwargs
        problems = [f"{name}= is unknown" for name in kwargs if name not in known]
        mesh, factor = kwargs.get("mesh"), kwargs.get("reshard_after_forward")
        if mesh is not None and mesh.ndim > 2 and kwargs.get("dp_mesh_dims") is None:
            problems.append(f"mesh has {mesh.ndim} dims, not 1 or 2")
        elif factor is not None and not isinstance(factor, bool):
            ranks = shard_count(kwargs)
            if not isinstance(factor, int) or factor <= 0 or ranks % factor:
                problems.append(f"reshard_after_forward={factor} is no factor of {ranks} ranks")
        if problems:
            wrong[draft.name] = problems
    if wrong:
        raise PolicyError(f"expected arguments of fully_shard, {known}, got {wrong}; correct the policy, or the call")


def check_shared(root: nn.Module, drafts: Sequence[Draft]) -> None:
    """Refuse a parameter in two groups, because each group would shard a separate copy and the copies would diverge."""
    shared = find_shared(drafts)
    if not shared:
        return
    merge_shared(root, drafts)  # raises if fix_shared=True would not help
    fqns: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in root.named_parameters(remove_duplicate=False):
        fqns.setdefault(parameter, []).append(fqn)
    found = {" = ".join(fqns[parameter]): [draft.name for draft in taking] for parameter, taking in shared.items()}
    raise SharedParameterError(
        f"expected every parameter in one group, got parameters in several groups, {found}; pass fix_shared=True to "
        "merge these groups, or select a shared module itself, if it is only ever called"
    )


def check_parameters(root: nn.Module, drafts: Sequence[Draft]) -> None:
    """Refuse parameters that `fully_shard` cannot shard."""
    fqns = {parameter: fqn for fqn, parameter in root.named_parameters()}
    wrong = {
        fqns[parameter]: reason
        for draft, parameters in collect_all(drafts).items()
        for parameter in parameters
        if (reason := _unshardable(parameter, draft.kwargs)) is not None
    }
    if wrong:
        raise UnshardableParameterError(
            f"expected parameters that can be sharded, got {wrong}; reshape them, or ignore their modules"
        )


def _unshardable(parameter: nn.Parameter, kwargs: Mapping[str, Any]) -> str | None:
    if parameter.ndim == 0:
        return "a scalar, not a tensor of one element"
    if not parameter.is_contiguous():
        return f"not contiguous: shape {tuple(parameter.shape)}, stride {parameter.stride()}"
    dim, ranks = shard_of(parameter, kwargs)
    size = local_shape(parameter)[dim]
    if dim > 0 and size % ranks:
        return f"{size} in dim {dim} over {ranks} ranks, where only dim 0 may be split unevenly"
    return None


def check_full_precision(root: nn.Module, modules: Collection[nn.Module]) -> None:
    """Refuse modules that would not compute in full precision."""
    inside = {parameter for module in modules for parameter in module.parameters()}
    wrong = {
        fqn: str(parameter.dtype)
        for fqn, parameter in root.named_parameters()
        if parameter in inside and parameter.is_floating_point() and parameter.dtype.itemsize < 4
    }
    names = names_of(root)
    wrong.update({names[module]: "a forward of its own" for module in modules if "forward" in vars(module)})
    if wrong:
        raise PrecisionOverrideError(
            f"expected float32 parameters and a forward that is the class's in mixed_precision_overrides, got {wrong}; "
            "call float() on these modules, and set no forward on them, before sharding"
        )


def frozen_warnings(drafts: Sequence[Draft]) -> Iterator[str]:
    """Warnings for groups that have both trainable and frozen parameters."""
    for draft, parameters in collect_all(drafts).items():
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        if frozen and len(frozen) < len(parameters):
            size = sum(unsharded_bytes(parameter, draft.kwargs) for parameter in frozen)
            trainable = len(parameters) - len(frozen)
            yield (
                f"{draft.name}: {len(frozen)} frozen parameters are in one group with {trainable} trainable ones; "
                f"they get no gradients, but each backward gathers their {size:,} bytes as well and holds them until "
                "the last gradient of the group is reduced; select modules that hold only one kind"
            )
