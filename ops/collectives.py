"""The runtime's all-gather and reduce-scatter: named in profiles, safe on gloo.

Each op takes the arguments of torch's functional op, plus the name of the range that a profile shows around it. An
empty name adds no range. As with torch's ops, the result is ready after `wait_tensor`, and the sent tensor must not
change before.

[Note: Two gathers at a time end the process]
torch (2.13.0) runs `_c10d_functional.all_gather_into_tensor` on gloo as ALLGATHER_COALESCED. After each collective, a
worker thread of `ProcessGroupGloo` assigns the collective's name to a string that all its threads share, without a
lock. This name is too long to be stored in place (15 characters), so the string allocates memory. If two gathers end at
one moment, the memory is freed twice: "malloc(): unaligned tcache chunk detected", or a segmentation fault, some steps
later. The gather below calls the out variant, which runs as ALLGATHER. A program in docs/passes.md shows the crash.

[Note: gloo between two ranks]
torch (2.13.0) runs a reduce-scatter on gloo as an all-reduce of a copy of the input, and takes the rank's part out of
the result. Between two ranks, this sends twice the necessary bytes and allocates a second buffer as large as the input.
An all-gather on gloo also takes longer than its bytes need. So two ranks on gloo exchange one message each way, by an
all-to-all whose splits leave nothing for the rank itself. On two cores, a gather of 12.5 MiB takes 4 to 6 ms instead of
8, and a reduction 4 instead of 11; a gather of 207 KiB takes 0.23 ms instead of 0.33, and a reduction 0.27 instead of
0.5 (2026-11-24).

Both ranks decide alike, because they decide by the process group, the dtype and the size. A sum of two ranks has only
one order, so all bits are equal to gloo's. More ranks use gloo's collectives, because the order could differ.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from compile_fsdp.torch_compat.autograd import BelowAutograd, is_profiling
from compile_fsdp.torch_compat.distributed import backend_name, functional_collectives, register_work, resolve_group

# Overloads, because finding the overload of a packet takes as long as the call.
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
    """Return a profiler range of this name during a profile."""
    return torch.profiler.record_function(name) if name and is_profiling() else nullcontext()


@torch.library.impl(_LIBRARY, "all_gather_into_tensor", "Meta")
def _gathered(input: Tensor, group_size: int, group_name: str, name: str) -> Tensor:
    """Allocate the joined inputs of all ranks along dim 0, not filled."""
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
    """Allocate this rank's part of `input` along dim 0, not filled."""
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
    """Return the process group if two ranks exchange messages, else None. See [Note: gloo between two ranks]."""
    if group_size != 2 or input.device.type != "cpu" or input.numel() == 0:
        return None
    group = resolve_group(group_name)
    return group if backend_name(group, "cpu") == "gloo" else None


def _halves(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Split along dim 0 into this rank's half and the peer's half."""
    first, second = tensor.chunk(2)
    return (first, second) if group.rank() == 0 else (second, first)


def _send_and_receive(sent: Tensor, received: Tensor, group: ProcessGroup) -> Work:
    # As bytes, because gloo's all-to-all does not support every dtype.
    source, target = (each.view(-1).view(torch.uint8) for each in (sent, received))
    splits = [0, source.numel()] if group.rank() == 0 else [source.numel(), 0]
    work: Work = group.alltoall_base(target, source, splits, splits)
    return work


class _Addition(Work):
    """Work that receives the peer's half in `received`, adds `own` once, and halves the sum if `is_mean`."""

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
