"""The all-gather of one parameter group as ops of a graph: launched, and finished at its first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compile_fsdp.compat import functional_collectives


@dataclass(slots=True)
class Launched:
    """An all-gather on its way.

    Attributes:
        output: (shard_count * sum of numels,), to be waited for.
        numels: Of each input, in the dtype of `output`.
        dtypes: Of each input; inputs of several dtypes travel as bytes.
        inputs_of: How many inputs each parameter has.
    """

    output: torch.Tensor
    numels: list[int]
    dtypes: list[torch.dtype]
    inputs_of: list[int]


def launch(
    inputs: list[list[torch.Tensor]],
    shard_count: int,
    group_name: str,
    custom: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Launched:
    """Send each parameter's 1-D inputs in one collective, or through the user's own communicator."""
    flat = [each for of_param in inputs for each in of_param]
    dtypes = [each.dtype for each in flat]
    if len(set(dtypes)) > 1:
        flat = [each.view(torch.uint8) for each in flat]
    own = flat[0] if len(flat) == 1 else torch.cat(flat)
    output = own
    if custom is not None and shard_count > 1:
        output = custom(own)
    elif shard_count > 1:
        output = functional_collectives.all_gather_into_tensor(own, shard_count, group_name)
    return Launched(output, [each.numel() for each in flat], dtypes, [len(of_param) for of_param in inputs])


def finish(launched: Launched, shard_count: int) -> list[list[torch.Tensor]]:
    """Wait; by parameter, (shard_count, numel) of each of its inputs from all ranks."""
    output = launched.output
    if shard_count > 1:
        output = functional_collectives.wait_tensor(output)
    rows = output.view(shard_count, sum(launched.numels)).split(launched.numels, dim=1)
    if len(set(launched.dtypes)) > 1:
        rows = [part.contiguous().view(dtype) for part, dtype in zip(rows, launched.dtypes, strict=True)]
    gathered, first = [], 0
    for count in launched.inputs_of:
        gathered.append(list(rows[first : first + count]))
        first += count
    return gathered
