"""Groups that an evaluation left unsharded.

[Note: A step behind an evaluation]
A forward without gradients leaves the root's parameters unsharded, as in eager FSDP2. The next training forward would
find them so, and Dynamo would compile the step a second time, without their gather. So they are resharded before that
forward, whose graph gathers equal values. They stay unsharded if a shard has changed since, because eager FSDP2 then
computes with the old values; or if the user has changed `requires_grad` of the parameters that the modules show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.states import Memory
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.autograd import get_versions
from compile_fsdp.torch_compat.distributed import local_tensor


class Evaluation:
    """Forwards without gradients between two training forwards of a root. See [Note: A step behind an evaluation]."""

    def __init__(self) -> None:
        self._before: set[TraceableGroup] = set()  # unsharded before the running forward
        self._left: dict[TraceableGroup, tuple[Sequence[int], Sequence[bool]]] = {}

    @at_run_time
    def begin_forward(self, groups: Collection[TraceableGroup]) -> None:
        """Reshard groups before a training forward, or prepare to follow a forward without gradients."""
        if not torch.is_grad_enabled():
            self._before = {group for group in groups if group.is_unsharded}
            return
        left, self._left = self._left, {}
        for group, facts in left.items():
            if group.memory is Memory.UNSHARDED and _facts(group) == facts:
                group.fsdp_group.reshard()

    @at_run_time
    def end_forward(self, groups: Collection[TraceableGroup]) -> None:
        """Note the groups that a forward without gradients has unsharded."""
        if not torch.is_grad_enabled():
            own = (group for group in groups if group.is_unsharded and group not in self._before)
            self._left |= {group: _facts(group) for group in own}


def _facts(group: TraceableGroup) -> tuple[Sequence[int], Sequence[bool]]:
    """Versions of the shards, and whether the unsharded parameters need gradients."""
    shards = [param.sharded_param for param in group.fsdp_group.fsdp_params]
    versions = get_versions([*shards, *map(local_tensor, shards)])  # optimizers write the DTensors themselves
    return versions, [param.unsharded_param.requires_grad for param in group.params]
