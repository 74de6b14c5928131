"""All-gather of one parameter group as graph ops: copy-in, copy-out, fill and free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_fsdp.ops import copy_, resize_storage_bytes_, split_with_sizes_copy
from compile_fsdp.runtime.tracing import group_call
from compile_fsdp.torch_compat.autograd import preserve_version_counter
from compile_fsdp.torch_compat.distributed import functional_collectives
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version


class Input(NamedTuple):
    """Layout of a 1-D all-gather input and of its unsharded value. A graph holds it as a plain tuple."""

    numel: int
    dtype: torch.dtype  # dtype in which the input is gathered
    is_cast: bool = False  # whether the input is cast to `dtype` before the all-gather
    # "rows" and "columns" join the ranks' shards, along dim 0 or `dim`. "flat" joins their slices of the flat padded
    # value. "inputs" keeps one row for each rank.
    kind: str = "inputs"
    size: tuple[int, ...] = ()  # of the unsharded value
    shard_size: tuple[int, ...] = ()  # of a rank's padded shard
    dim: int = 0


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Constants of one group's all-gather."""

    name: str  # of the all-gather in a profile, equal to eager FSDP2's name
    shard_count: int  # number of ranks that send; 1 without a collective
    process_group: str  # name of the sending ranks' process group
    device: torch.device | None  # to which offloaded shards move before the all-gather; None without CPU offload
    inputs: list[tuple[Any, ...]]  # an `Input` for each parameter, as a plain tuple
    storage_bytes: list[int]  # bytes of each unsharded parameter, or of each of its parts


@dataclass(slots=True)
class Launched:
    """A gather ahead of the use of its values."""

    output: torch.Tensor | None  # (shard_count * sum of numels,), not waited for yet; None after an eager gather
    # An `Input` for each sent tensor if an extension chose the tensors. Else None, and the group's plan has the inputs,
    # because numbers that Dynamo finds again behind a graph break become symbols.
    inputs: list[tuple[Any, ...]] | None = None


EAGER_GATHER = Launched(None)


@group_call
def copy_in(
    tensors: Sequence[torch.Tensor], inputs: Sequence[tuple[Any, ...]], device: torch.device | None
) -> torch.Tensor:
    """Move this rank's inputs to `device`, cast them, and concatenate them, as bytes if their dtypes differ."""
    sent = []
    described = [Input(*each) for each in inputs]
    as_bytes = len({each.dtype for each in described}) > 1
    for tensor, each in zip(tensors, described, strict=True):
        if device is not None:
            tensor = tensor.to(device, non_blocking=True)
        if each.is_cast:
            tensor = tensor.to(each.dtype)
        sent.append(tensor.view(torch.uint8) if as_bytes else tensor)
    return sent[0] if len(sent) == 1 else torch.cat(sent)


@group_call
def copy_out(output: torch.Tensor, shard_count: int, inputs: Sequence[tuple[Any, ...]]) -> tuple[torch.Tensor, ...]:
    """Split an all-gather output, after the wait for it, and join the ranks' parts of each input."""
    described = [Input(*each) for each in inputs]
    as_bytes = len({each.dtype for each in described}) > 1
    numels = [each.numel * each.dtype.itemsize if as_bytes else each.numel for each in described]
    rows = output.view(shard_count, sum(numels))
    parts = [rows] if len(numels) == 1 else split_with_sizes_copy(rows, numels, 1)
    values = []
    for i, each in enumerate(described):
        values.append(_join(parts[i].view(each.dtype) if as_bytes else parts[i], shard_count, each))
    return tuple(values)


def _join(rows: torch.Tensor, shard_count: int, each: Input) -> torch.Tensor:
    if each.kind == "inputs":
        return rows
    if each.kind == "flat":
        return rows.view(-1)[: math.prod(each.size)].view(each.size)
    if each.kind == "columns":
        shards = rows.reshape(shard_count, *each.shard_size).unbind(0)
        return torch.cat([shards[i] for i in range(shard_count)], dim=each.dim)
    length = each.shard_size[0] * shard_count
    full = rows.view(length, *each.shard_size[1:])
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
    """Wait for an all-gather, and fill the unsharded parameters from its output."""
    output = functional_collectives.wait_tensor(launched) if shard_count > 1 else launched
    fill(unsharded_params, copy_out(output, shard_count, inputs), storage_bytes)


def _refill(unsharded_param: Any, value: Any) -> None:
    # Keep the version counter, because tensors that autograd saved of the parameter are valid again. Under a proxy, ops
    # read and set the version, because fake tensors do not know it, unless the graph has no backward that could check.
    if not isinstance(unsharded_param, fx.Proxy):
        with preserve_version_counter(unsharded_param):
            copy_(unsharded_param, value)
    elif torch.is_grad_enabled():
        version = tensor_version(unsharded_param)
        copy_(unsharded_param, value)
        set_version_counter((unsharded_param,), (version,))
    else:
        copy_(unsharded_param, value)


@group_call
def free(unsharded_params: Sequence[torch.Tensor], storage_bytes: Sequence[int]) -> None:
    for unsharded_param, size in zip(unsharded_params, storage_bytes, strict=True):
        if size > 0:
            resize_storage_bytes_(unsharded_param, 0)
