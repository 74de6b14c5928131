"""All-gather and reduce-scatter of the runtime: torch's functional ones, with a name for profiles, and safe on gloo.

Each takes what torch's op takes, and the name of the range that a profile shows around it; empty for none. As with
torch's, the result is there once `wait_tensor` of it has returned, and what is sent stays as it is until then.

[Note: Two gathers at a time end the process]
torch (2.13.0) runs `_c10d_functional.all_gather_into_tensor` on gloo as ALLGATHER_COALESCED. After each collective, a
worker thread of `ProcessGroupGloo` assigns the collective's name to a string that all its threads share, unlocked. Up
to 15 characters lie within the string itself; this name is allocated, and where two gathers end at a time it is freed
twice: "malloc(): unaligned tcache chunk detected", or a segmentation fault, some steps later. The out variant, which
the gather below calls, runs as ALLGATHER, which fits. docs/passes.md has a program that shows it.

[Note: What gloo does for two ranks]
torch (2.13.0) runs a reduce-scatter on gloo as an all-reduce of a copy of its input, and takes a rank's part out of the
result: between two ranks, twice the bytes that need to travel, and a second buffer as large as the first. An all-gather
takes gloo longer than its bytes do, too. So two ranks on gloo exchange one message each way, by an all-to-all whose
splits leave nothing for the rank itself. On two cores, 12.5 MiB are gathered in 4 to 6 ms in place of 8, and reduced in
4 in place of 11; 207 KiB in 0.23 ms in place of 0.33, and 0.27 in place of 0.5 (2026-11-24).

Both ranks decide alike, by the process group, the dtype and the size. Between two ranks a sum has one order only, so
all bits are equal to gloo's; between more it could have another than gloo's, so there gloo's collectives stay.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from compile_fsdp.torch_compat.autograd import BelowAutograd, is_profiling
from compile_fsdp.torch_compat.distributed import backend_name, functional_collectives, register_work, resolve_group

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


def _named_range(name: str) -> AbstractContextManager[object]:
    """A range of this name in a profile, if one is being made."""
    return torch.profiler.record_function(name) if name and is_profiling() else nullcontext()


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "Meta")
def _gathered(input: Tensor, group_size: int, group_name: str, name: str) -> Tensor:
    """What all ranks' inputs, joined along the first dim, have room in; not filled."""
    return input.new_empty((input.shape[0] * group_size, *input.shape[1:]))


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "CompositeExplicitAutograd")
def _all_gather(input: Tensor, group_size: int, group_name: str, name: str) -> Tensor:
    with _named_range(name):
        output = _gathered(input, group_size, group_name, name)
        group = _find_gloo_pair(input, group_size, group_name)
        if group is None:
            _GATHER_INTO(input.contiguous(), group_size, group_name, out=output)
            return output
        own, others = _halves(output, group)
        register_work(output, _send_and_receive(input.contiguous(), others, group))
        own.copy_(input)
    return output


@torch.library.impl(_LIBRARY, "reduce_scatter_tensor", "Meta")
def _reduced(input: Tensor, reduce_op: str, group_size: int, group_name: str, name: str) -> Tensor:
    """What this rank's part of `input`, along its first dim, has room in; not filled."""
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


@torch.library.impl(_LIBRARY, "reduce_scatter_tensor", "CompositeExplicitAutograd")
def _reduce_scatter(input: Tensor, reduce_op: str, group_size: int, group_name: str, name: str) -> Tensor:
    with _named_range(name), BelowAutograd():
        can_add = reduce_op in ("sum", "avg") and input.is_floating_point()
        group = _find_gloo_pair(input, group_size, group_name) if can_add else None
        if group is None:
            reduced: Tensor = _REDUCE(input, reduce_op, group_size, group_name)
            return reduced
        own, others = _halves(input, group)
        output = _reduced(input, reduce_op, group_size, group_name, name)
        message = _send_and_receive(others.contiguous(), output, group)
        register_work(output, _Addition(message, output, own, reduce_op == "avg"))
    return output


def _find_gloo_pair(input: Tensor, group_size: int, group_name: str) -> ProcessGroup | None:
    """The process group, if it is two ranks on gloo; see [Note: What gloo does for two ranks]."""
    if group_size != 2 or input.device.type != "cpu" or input.numel() == 0:
        return None
    group = resolve_group(group_name)
    return group if backend_name(group, "cpu") == "gloo" else None


def _halves(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Along the first dim, what belongs to this rank and what to the other."""
    first, second = tensor.chunk(2)
    return (first, second) if group.rank() == 0 else (second, first)


def _send_and_receive(sent: Tensor, received: Tensor, group: ProcessGroup) -> Work:
    # As bytes, since gloo's all-to-all does not know every dtype.
    source, target = (each.view(-1).view(torch.uint8) for each in (sent, received))
    splits = [0, source.numel()] if group.rank() == 0 else [source.numel(), 0]
    work: Work = group.alltoall_base(target, source, splits, splits)
    return work


class _Addition(Work):
    """The arrival of the other rank's half, to which this rank's own is then added, once.

    Args:
        message: The arrival.
        received: Where the other's half arrives, and the result is to be.
        own: This rank's half.
        is_mean: Whether the result is half the sum.
    """

    def __init__(self, message: Work, received: Tensor, own: Tensor, is_mean: bool) -> None:
        super().__init__()
        self._message = message
        self._left: tuple[Tensor, Tensor, bool] | None = (received, own, is_mean)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._message.wait(timeout)
        if self._left is not None:
            received, own, is_mean = self._left
            self._left = None
            with torch.no_grad():
                received.add_(own)
                if is_mean:
                    received.div_(2)
        return True
