"""Torch's functional all-gather and reduce-scatter, with a name for profiles.

Each takes what torch's op takes, and the name of the range that a profile shows around it; empty for none.

[Note: Two gathers at a time end the process]
torch (2.13.0) runs `_c10d_functional.all_gather_into_tensor` on gloo as ALLGATHER_COALESCED. After each collective, a
worker thread of `ProcessGroupGloo` assigns the collective's name to a string that all its threads share, unlocked. Up
to 15 characters lie within the string itself; this name is allocated, and where two gathers end at a time it is freed
twice: "malloc(): unaligned tcache chunk detected", or a segmentation fault, some steps later. The out variant, which
the gather below calls, runs as ALLGATHER, which fits. docs/passes.md has a program that shows it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from compile_fsdp.compat import functional_collectives, is_profiling

# Overloads: to find one of a packet takes as long as the call.
_GATHER_INTO = functional_collectives.all_gather_into_tensor_out.default
_REDUCE = functional_collectives.reduce_scatter_tensor.default

_LIBRARY = torch.library.Library("compile_fsdp", "FRAGMENT")
_LIBRARY.define("all_gather_into_tensor(Tensor input, int group_size, str group_name, str name) -> Tensor")
_LIBRARY.define(
    "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, str name) -> Tensor"
)

all_gather_into_tensor = torch.ops.compile_fsdp.all_gather_into_tensor.default
reduce_scatter_tensor = torch.ops.compile_fsdp.reduce_scatter_tensor.default


def named_range(name: str) -> AbstractContextManager[object]:
    """A range of this name in a profile, if one is being made."""
    return torch.profiler.record_function(name) if name and is_profiling() else nullcontext()


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "Meta")
def gathered(input: Tensor, group_size: int, group_name: str, name: str) -> Tensor:
    """What all ranks' inputs, joined along the first dim, have room in; not filled."""
    return input.new_empty((input.shape[0] * group_size, *input.shape[1:]))


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "CompositeExplicitAutograd")
def _all_gather(input: Tensor, group_size: int, group_name: str, name: str) -> Tensor:
    with named_range(name):
        output = gathered(input, group_size, group_name, name)
        _GATHER_INTO(input, group_size, group_name, out=output)
    return output


@torch.library.impl(_LIBRARY, "reduce_scatter_tensor", "Meta")
def _reduced(input: Tensor, reduce_op: str, group_size: int, group_name: str, name: str) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


@torch.library.impl(_LIBRARY, "reduce_scatter_tensor", "CompositeExplicitAutograd")
def _reduce_scatter(input: Tensor, reduce_op: str, group_size: int, group_name: str, name: str) -> Tensor:
    with named_range(name):
        output: Tensor = _REDUCE(input, reduce_op, group_size, group_name)
    return output
