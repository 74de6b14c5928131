"""The all-gather of one parameter group as ops of a graph: what is sent, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.runtime.group_calls import group_call
from compile_fsdp.torch_compat.autograd import preserve_version_counter
from compile_fsdp.torch_compat.distributed import functional_collectives
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version


class Input(NamedTuple):
    """One of the 1-D tensors that a rank sends, and what is made of it. A graph has it as a plain tuple.

    Attributes:
        numel: Its elements.
        dtype: In which it is gathered.
        is_cast: Whether it has another dtype before it is sent.
        kind: "rows" and "columns" join the ranks' shards, "flat" their slices of the flat padded value; "inputs" leaves
            them as they are, one row for each rank.
        size: Of the unsharded value.
        shard_size: Of one rank's padded shard.
        dim: The sharded dim.
    """

    numel: int
    dtype: torch.dtype
    is_cast: bool = False
    kind: str = "inputs"
    size: tuple[int, ...] = ()
    shard_size: tuple[int, ...] = ()
    dim: int = 0


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The constants of one group's gather.

    Attributes:
        shard_count: Ranks that send; 1 for no collective.
        process_group: Their process group's name.
        device: Where shards that lie elsewhere (CPU offload) are sent from.
        inputs: An `Input` for each parameter.
        storage_bytes: Of each unsharded parameter, or part of one.
    """

    shard_count: int
    process_group: str
    device: torch.device | None
    inputs: list[tuple[Any, ...]]
    storage_bytes: list[int]


@dataclass(slots=True)
class Launched:
    """An all-gather on its way.

    Attributes:
        output: (shard_count * sum of numels,), to be waited for.
        inputs: What was sent, if extensions have a say in it. Else the group's plan tells: numbers that Dynamo finds
            again behind a graph break would be symbols.
    """

    output: torch.Tensor
    inputs: list[tuple[Any, ...]] | None


def _travels_as_bytes(inputs: Sequence[Input]) -> bool:
    return len({each.dtype for each in inputs}) > 1


@group_call
def copy_in(
    tensors: Sequence[torch.Tensor], inputs: Sequence[tuple[Any, ...]], device: torch.device | None
) -> torch.Tensor:
    """What this rank sends: its inputs, on `device` and in the dtypes in which they travel, one behind the other."""
    sent = []
    described = [Input(*each) for each in inputs]
    as_bytes = _travels_as_bytes(described)
    for tensor, each in zip(tensors, described, strict=True):
        if device is not None:
            tensor = tensor.to(device, non_blocking=True)
        if each.is_cast:
            tensor = tensor.to(each.dtype)
        sent.append(tensor.view(torch.uint8) if as_bytes else tensor)
    return sent[0] if len(sent) == 1 else torch.cat(sent)


@group_call
def copy_out(output: torch.Tensor, shard_count: int, inputs: Sequence[tuple[Any, ...]]) -> tuple[torch.Tensor, ...]:
    """By input, what the ranks' `copy_in`s make together; `output` has been waited for."""
    described = [Input(*each) for each in inputs]
    as_bytes = _travels_as_bytes(described)
    numels = [each.numel * each.dtype.itemsize if as_bytes else each.numel for each in described]
    parts = output.view(shard_count, sum(numels)).split(numels, dim=1)
    values = []
    for i, each in enumerate(described):
        rows = parts[i].contiguous().view(each.dtype) if as_bytes else parts[i]
        values.append(_join(rows, shard_count, each))
    return tuple(values)


def _join(rows: torch.Tensor, shard_count: int, each: Input) -> torch.Tensor:
    if each.kind == "inputs":
        return rows
    if each.kind == "flat":
        return rows.contiguous().view(-1)[: math.prod(each.size)].view(each.size)
    if each.kind == "columns":
        shards = rows.reshape(shard_count, *each.shard_size).unbind(0)
        return torch.cat([shards[i] for i in range(shard_count)], dim=each.dim)
    length = each.shard_size[0] * shard_count
    # Not reshape(), which returns a view with gaps where a rank has one row.
    full = rows.contiguous().view(length, *each.shard_size[1:])
    return full if length == each.size[0] else full[: each.size[0]]


@group_call
def fill(
    unsharded_params: Sequence[torch.Tensor], values: Sequence[torch.Tensor], storage_bytes: Sequence[int]
) -> None:
    """Allocate unsharded parameters and fill them."""
    for unsharded_param, value, size in zip(unsharded_params, values, storage_bytes, strict=True):
        if size > 0:
            resize_storage_bytes_(unsharded_param, size)
            _refill(unsharded_param, value)


@group_call
def wait_and_copy_out(
    launched: torch.Tensor,
    shard_count: int,
    inputs: Sequence[tuple[Any, ...]],
    unsharded_params: Sequence[torch.Tensor],
    storage_bytes: Sequence[int],
) -> None:
    """Wait for an all-gather, split its output by parameter, and fill the unsharded parameters."""
    output = functional_collectives.wait_tensor(launched) if shard_count > 1 else launched
    fill(unsharded_params, copy_out(output, shard_count, inputs), storage_bytes)


def _refill(unsharded_param: Any, value: Any) -> None:
    # What autograd saved of the parameter is valid again: its version stays. Fake tensors do not know theirs.
    if isinstance(unsharded_param, fx.Proxy):
        version = tensor_version(unsharded_param)
        copy_(unsharded_param, value)
        set_version_counter((unsharded_param,), (version,))
    else:
        with preserve_version_counter(unsharded_param):
            copy_(unsharded_param, value)


@group_call
def free(unsharded_params: Sequence[torch.Tensor], storage_bytes: Sequence[int]) -> None:
    """Free unsharded parameters."""
    for unsharded_param, size in zip(unsharded_params, storage_bytes, strict=True):
        if size > 0:
            resize_storage_bytes_(unsharded_param, 0)
