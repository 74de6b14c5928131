"""Describe a model's sharding, for comparisons."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Describe each `fully_shard` call on a model, with its parameter groups, by module order."""
    names = {module: fqn for fqn, module in model.named_modules()}
    states = [module._get_fsdp_state() for module in names if isinstance(module, FSDPModule)]
    return [
        {
            "modules": [names[module] for module in state._modules],
            "mp_policy": state._mp_policy,
            "auto_reshard": state._auto_reshard_after_forward,
            "groups": [_group(group, names) for group in param_groups(state)],
        }
        for state in dict.fromkeys(states)
    ]


def _group(group: Any, names: dict[nn.Module, str]) -> dict[str, Any]:
    after = group.post_forward_mesh_info
    infos = [param._module_info for param in group.fsdp_params]
    return {
        # FQNs, in the first module that holds each parameter.
        "parameters": [".".join(filter(None, (names[info.module], info.param_name))) for info in infos],
        "mesh": (group.mesh_info.mesh.mesh_dim_names, tuple(group.mesh_info.mesh.shape)),
        "after_forward": None if after is None else tuple(after.mesh.shape),
        "offload": [param.offload_to_cpu for param in group.fsdp_params],
        "shards": [(param.fsdp_placement, param.padded_sharded_param_size) for param in group.fsdp_params],
        "bytes_per_rank": sum(
            param._sharded_param_data.numel() * param._sharded_param_data.element_size() for param in group.fsdp_params
        ),
    }


def snapshot(model: nn.Module) -> list[Any]:
    """Record everything that sharding changes: classes, attributes, hooks, and the parameters' identities."""
    return [
        (
            fqn,
            type(module),
            sorted(vars(module)),
            {name: (id(own), own is not None and own.requires_grad) for name, own in module._parameters.items()},
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
        )
        for fqn, module in model.named_modules()
    ]


def unsharded_bytes(model: nn.Module) -> int:
    """Bytes of unsharded parameters and of all-gather outputs on this rank."""
    held = 0
    for state in filter(None, map(fsdp_state, model.modules())):
        for group in param_groups(state):
            for param in group.fsdp_params:
                tensors = [*param.all_gather_outputs, getattr(param, "_unsharded_param", None)]
                held += sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
    return held
