"""How many bytes FSDP2 allocates for one group, as formulas in the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import sympy
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.amounts import Amount, N, rows, total
from compile_fsdp.tools.planning.float8 import FORWARD_DTYPE, float8_weights
from compile_fsdp.torch_compat.fsdp import HAS_GRAD_DTYPES
from compile_fsdp.wrap import Group, Plan


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The bytes that FSDP2 allocates for one group on one rank.

    Attributes:
        parameters: The group's parameters by FQN.
        policy: The mixed-precision policy of the group.
        reshard_after_forward: Whether the unsharded parameters are freed between forward and backward.
        float8: FQNs of the parameters that are gathered in float8.
    """

    parameters: dict[str, nn.Parameter]
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    float8: frozenset[str] = frozenset()

    def shards(self, of: Collection[str] | None = None) -> Amount:
        """Bytes of sharded parameters, or of their gradients, in the parameters' dtype: (ceil(d0 / N), *rest) each."""
        return self._sum(lambda fqn: self.parameters[fqn].dtype, of)

    def gather_input(self) -> Amount:
        """Bytes that this rank sends in an all-gather."""
        return self._sum(self._gathered_dtype)

    def gathered(self) -> Amount:
        """Bytes of the all-gather output, and of the unsharded parameters: N equal padded shards."""
        return self.gather_input().times_ranks()

    def cast(self) -> Amount:
        """Bytes of the copies of shards that are cast to another dtype before they are gathered."""
        cast = [fqn for fqn, each in self.parameters.items() if self._gathered_dtype(fqn) != each.dtype]
        return self._sum(self._gathered_dtype, cast)

    def casting(self) -> Iterator[Amount]:
        """Bytes that are there while each parameter in turn is cast to float8, scaled and clamped in float32 before."""
        done = Amount()
        for fqn in self.parameters:
            if fqn in self.float8:
                shard = self._sum(self._gathered_dtype, [fqn])
                yield done + total([shard] * (1 + 2 * torch.float32.itemsize))
                done += shard

    def reduced(self, of: Collection[str]) -> Amount:
        """Bytes that this rank gets from a reduce-scatter of the gradients of these parameters."""
        return self._sum(lambda fqn: self._reduced_dtype(self.parameters[fqn]), of)

    def accumulated(self, of: Iterable[str]) -> int:
        """Bytes of unsharded gradients of these parameters in the dtype of the reduction."""
        found = (self.parameters[fqn] for fqn in of)
        return sum(each.numel() * self._reduced_dtype(each).itemsize for each in found)

    def casts_reduced(self, of: Iterable[str]) -> bool:
        """Whether reduced gradients are cast to the parameters' dtype, which makes a copy."""
        return any(self._reduced_dtype(self.parameters[fqn]) != self.parameters[fqn].dtype for fqn in of)

    def padded_copies(self, of: Iterable[str]) -> Amount:
        """Bytes of padded copies of gradients whose rows N does not divide, which `chunk_cat` makes on CPUs."""
        result = Amount()
        for fqn in of:
            parameter = self.parameters[fqn]
            shard = _bytes(parameter, self._computed_dtype(parameter))
            uneven = sympy.sign(sympy.Mod(parameter.shape[0], N))
            result = result + Amount({term * uneven: each for term, each in shard.items()}).times_ranks()
        return result

    def _gathered_dtype(self, fqn: str) -> torch.dtype:
        return FORWARD_DTYPE if fqn in self.float8 else self._computed_dtype(self.parameters[fqn])

    def _computed_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype of the group's unsharded parameters, but for float8, and of their gradients."""
        return self.policy.param_dtype if self.policy.param_dtype and parameter.is_floating_point() else parameter.dtype

    def _reduced_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        if self.policy.reduce_dtype is not None:
            return self.policy.reduce_dtype
        return parameter.dtype if HAS_GRAD_DTYPES else self._computed_dtype(parameter)

    def _sum(self, dtype: Callable[[str], torch.dtype], of: Collection[str] | None = None) -> Amount:
        names = self.parameters if of is None else of
        return total(_bytes(self.parameters[fqn], dtype(fqn)) for fqn in names)


def _bytes(parameter: nn.Parameter, dtype: torch.dtype) -> Amount:
    """Bytes of one shard in a dtype."""
    length, *rest = parameter.shape
    return Amount({rows(length): Fraction(math.prod(rest) * dtype.itemsize)})


def group_sizes(plan: Plan) -> list[GroupSizes]:
    """The sizes of every group of a plan.

    Raises:
        EstimateError: the plan has a feature that cannot be estimated.
    """
    parameters = dict(plan.root.named_parameters())
    problems = {group.name: found for group in plan.groups if (found := list(_unsupported(group, parameters)))}
    if plan.full_precision:
        problems["mixed_precision_overrides"] = [f"{len(plan.full_precision)} modules"]
    if problems:
        raise EstimateError(
            f"expected whole parameters sharded on dim 0 of a mesh of one dim, got {problems}; estimate a plan without"
        )
    float8 = float8_weights(plan.root)
    return [
        GroupSizes(
            {fqn: parameters[fqn] for fqn in group.parameters},
            group.kwargs.get("mp_policy") or MixedPrecisionPolicy(),
            _reshards(group, plan.root),
            frozenset(fqn for fqn in group.parameters if id(parameters[fqn]) in float8),
        )
        for group in plan.groups
    ]


def _reshards(group: Group, root: nn.Module) -> bool:
    """By default, FSDP2 keeps the root's parameters unsharded for the backward, which begins with them."""
    reshard = group.kwargs.get("reshard_after_forward")
    return root not in group.modules if reshard is None else bool(reshard)


def _unsupported(group: Group, parameters: dict[str, nn.Parameter]) -> Iterable[str]:
    mesh, reshard = group.kwargs.get("mesh"), group.kwargs.get("reshard_after_forward")
    if mesh is not None and mesh.ndim != 1:
        yield f"a mesh of {mesh.ndim} dims"
    if reshard is not None and not isinstance(reshard, bool):
        yield f"reshard_after_forward={reshard}"
    if group.kwargs.get("shard_placement_fn") is not None:
        yield "shard_placement_fn"
    if isinstance(group.kwargs.get("offload_policy"), CPUOffloadPolicy):
        yield "CPUOffloadPolicy"
    if any(isinstance(parameters[fqn], DTensor) for fqn in group.parameters):
        yield "DTensor parameters"
    if any(hasattr(parameters[fqn], "fsdp_pre_all_gather") for fqn in group.parameters):
        yield "parameters with all-gather extensions"
