"""Sizes of a graph's parameter groups, for its report."""

from __future__ import annotations

from collections.abc import Collection

from compile_fsdp.advice import GroupFigures
from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.torch_compat.fsdp import unsharded_dtype
from compile_fsdp.wrap.tree import ROOT


def group_figures(inputs: GraphInputs, left_unsharded: Collection[TraceableGroup]) -> tuple[GroupFigures, ...]:
    """Return the figures of a forward graph's groups, in input order.

    `left_unsharded` are the groups that the passes leave unsharded for the backward.
    """
    once = {*left_unsharded, *inputs.looked_up()}  # the backward gathers nothing of these
    return tuple(_figures(group, group in once) for group in inputs.groups)


def _figures(group: TraceableGroup, is_once: bool) -> GroupFigures:
    fsdp_group, ranks = group.fsdp_group, group.constants.shard_count
    reduce_dtype = fsdp_group._reduce_dtype
    numels = [(param, param.plan.shard_numel * ranks) for param in group.params]
    is_once = is_once or fsdp_group.post_forward_mesh_info is None or not fsdp_group.unshard_in_backward
    again = group.constants.post_forward_count if fsdp_group._use_post_forward_mesh else ranks
    return GroupFigures(
        name=fsdp_group._module_fqn or ROOT,
        unsharded=tuple(numel * unsharded_dtype(param.fsdp_param).itemsize for param, numel in numels),
        reduced=tuple(
            numel * (reduce_dtype or unsharded_dtype(param.fsdp_param)).itemsize
            for param, numel in numels
            if param.fsdp_param.sharded_param.requires_grad
        ),
        factors=sum(numel for param, numel in numels if len(param.plan.shard_size) > 1),
        ranks=ranks,
        backward_ranks=1 if is_once else again,
    )
