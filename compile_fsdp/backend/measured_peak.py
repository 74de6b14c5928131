"""Compare the peak of a step with its memory budget, and decide again if it was exceeded.

[Note: A budget is a promise]
A decision rests on an estimate. On a device that counts its memory, the first step shows the real peak. If it exceeds
the budget on any rank, all ranks lower the budget of the estimate by its largest error, and trace the next forward
again. The excess alone would not do: the estimate of a step that exceeds its budget may be far below the budget, and
the same decision would still fit. This happens once, and only for a graph about which all ranks have decided together.
The device's counter of its peak is not reset, because users read it. If it shows an earlier, higher peak, that of the
step is not known, and the decision stays. A CPU does not count its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from compile_fsdp.backend.agreement import share_largest
from compile_fsdp.backend.compiled_forward import CompiledForward
from compile_fsdp.backend.memory_budget import find_agreement
from compile_fsdp.passes.text import format_bytes
from compile_fsdp.runtime.attached import hooks_of
from compile_fsdp.runtime.group import TraceableGroup

_log = logging.getLogger("compile_fsdp")


def begin_peak(forward: CompiledForward, groups: Iterable[TraceableGroup]) -> Callable[[], None] | None:
    """Begin to measure the peak of a step; return a function for the end of its backward.

    That function compares the peak with the budget on all ranks. None if this has happened before, or if there is
    nothing to compare or to count.
    """
    step, decision, every = forward.step, forward.step.decision, list(groups)
    if decision is None or forward.whole_of is None:
        return None
    agreement = find_agreement(every[0], step.groups, step.options)
    device = every[0].fsdp_group.device
    module = torch.get_device_module(device)
    if agreement is None or agreement.is_measured or not hasattr(module, "max_memory_allocated"):
        return None
    before, earlier = module.memory_allocated(device), module.max_memory_allocated(device)

    def end() -> None:
        if agreement.is_measured:
            return
        agreement.is_measured = True
        highest = module.max_memory_allocated(device)
        taken = highest - before if highest > earlier else 0
        excess = max(taken - decision.budget, 0)
        error = taken - min(decision.peak_bytes, decision.budget) if excess else 0
        row = error, f"{error} {excess}"
        text = share_largest(_mesh_group_names(every), "peak of the first step", row, step.options.agreement_timeout_s)
        error, excess = map(int, text.split())
        if error:
            agreement.lowered = error
            hooks_of(every[0].state).root.lowered_budgets += "|"
            _log.warning(
                "the first step exceeded its memory_budget of %s by %s on a rank; the next forward is compiled again, "
                "with %s of the budget kept free",
                format_bytes(decision.budget),
                format_bytes(excess),
                format_bytes(error),
            )

    return end


def _mesh_group_names(groups: Iterable[TraceableGroup]) -> list[str]:
    """Return the names of the process groups of all mesh dims of the parameters.

    Dims of tensor parallelism belong to them, because all ranks of a mesh must trace again or none.
    """
    params = (param.sharded_param for group in groups for param in group.fsdp_group.fsdp_params)
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    return list(dict.fromkeys(each.group_name for mesh in meshes for each in mesh.get_all_groups()))
