"""`compile_fsdp::all_gather_into_tensor`: what torch's functional all-gather does, safe with gloo.

[Note: Two gathers at a time end the process]
torch (2.13.0) runs `_c10d_functional.all_gather_into_tensor` on gloo as ALLGATHER_COALESCED. After each collective, a
worker thread of `ProcessGroupGloo` assigns the collective's name to a string that all its threads share, unlocked. Up
to 15 characters lie within the string itself; this name is allocated, and where two gathers end at a time it is freed
twice: "malloc(): unaligned tcache chunk detected", or a segmentation fault, some steps later. The out variant runs as
ALLGATHER, which fits. docs/passes.md has a program that shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_fsdp.compat import functional_collectives, has_inductor_lowering, register_gather_lowering

_LIBRARY = torch.library.Library("compile_fsdp", "FRAGMENT")
_LIBRARY.define("all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor")

all_gather_into_tensor = torch.ops.compile_fsdp.all_gather_into_tensor.default


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "Meta")
def _allocate(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return input.new_empty((input.shape[0] * group_size, *input.shape[1:]))


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "CompositeExplicitAutograd")
def _gather(input: Tensor, group_size: int, group_name: str) -> Tensor:
    output = _allocate(input, group_size, group_name)
    functional_collectives.all_gather_into_tensor_out(input, group_size, group_name, out=output)
    return output


def ensure_gather_lowering() -> None:
    """Make the op known to Inductor as a collective. Imports Inductor."""
    if not has_inductor_lowering(all_gather_into_tensor):
        register_gather_lowering(all_gather_into_tensor)
