"""One parameter group of FSDP2 while it is traced: gather, free, reduce.

[Note: Traced and eager branch share the state]
Every tensor and every state below belongs to torch's own FSDPParamGroup and FSDPParam: the sharded parameter,
its padded local data, the unsharded parameter and the group's ShardedState. A traced step leaves them as an
eager step would, so that the next step may run either way. What this file adds to them lives only between the
start and the end of one backward.

[Note: One object for life]
The unsharded parameter is created once, before the first traced use, with an empty storage. A traced step
resizes that storage and copies the gathered value into it, so that the parameter is never an alias of a gather
buffer at a graph boundary. `passes/remove_unshard_copies.py` takes both ops out again where a graph proves that
nobody outside of it can see them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from compile_fsdp.compat import (
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    chunk_cat,
    free_storage,
    functional_collectives,
    gradient_divide_factors,
    param_groups,
    preserve_version_counter,
)
from compile_fsdp.ops import copy_


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """The constants of one parameter: equal on every rank, since only padded sizes enter.

    They are kept as text: where Dynamo compiles a hook as a frame of its own, it would turn a number that differs
    from module to module into a symbol, and Inductor resizes a storage to a plain number only.
    """

    size_text: str
    padded_shard_size_text: str
    shard_numel_text: str
    shard_dim: int
    storage_bytes_text: str

    @property
    def size(self) -> tuple[int, ...]:
        """Of the unsharded parameter."""
        return _read_sizes(self.size_text)

    @property
    def padded_shard_size(self) -> tuple[int, ...]:
        """Of one rank's padded shard."""
        return _read_sizes(self.padded_shard_size_text)

    @property
    def shard_numel(self) -> int:
        """Elements of the padded shard."""
        return int(self.shard_numel_text)

    @property
    def storage_bytes(self) -> int:
        """Of the unsharded parameter, with its padding."""
        return int(self.storage_bytes_text)


def _read_sizes(text: str) -> tuple[int, ...]:
    return tuple([int(size) for size in text.split(",")])


def _write_sizes(sizes: torch.Size) -> str:
    return ",".join(str(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are averaged over the ranks without overflow in the reduce dtype."""

    op: str  # of the functional reduce-scatter: "avg" or "sum"
    pre_divisor: float | None
    post_divisor: float | None


class TraceableGroup:
    """The traced branch of one FSDPParamGroup.

    Attributes:
        active: True while a compiled backward runs; the gradient hooks do nothing otherwise.
        pending: Unsharded parameters of this backward whose gradients are still to come; 0 outside of it.
    """

    def __init__(self, group: FSDPParamGroup, state: FSDPState) -> None:
        self.group = group
        self.state = state
        group._compile_fsdp_traceable = self  # type: ignore[attr-defined]
        self.params: list[FSDPParam] = group.fsdp_params
        self.plans: list[ParamPlan] = []
        self.world_size = 0
        self.group_name = ""
        self.reduction = Reduction("sum", None, None)
        self.watched: set[int] = set()  # parameters whose gradient hook is registered
        self.active = False
        self.pending = 0
        self.reduced: torch.Tensor | None = None  # (sum of padded shard numels,), in the parameters' dtype
        self.reduced_params: list[int] = []

    # Setting up, for real and before anything is traced

    def prepare(self) -> None:
        """Create the unsharded parameters, empty, and the constants that tracing needs."""
        process_group = self.group._all_gather_process_group
        self.world_size = process_group.size()
        self.group_name = process_group.group_name
        # Created under inference_mode they would be inference tensors, and training would never work again.
        with torch.inference_mode(False), torch.no_grad():
            for param in self.params:
                self._create_unsharded(param)
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
        self.plans = [self._plan(param) for param in self.params]
        self.reduction = self._plan_reduction()
        for index, param in enumerate(self.params):
            self._watch_gradient(index, param._unsharded_param)

    def _create_unsharded(self, param: FSDPParam) -> None:
        if hasattr(param, "_unsharded_param"):
            return
        data = param._sharded_param_data
        dtype = param.param_dtype or param.orig_dtype
        param.init_all_gather_outputs([data.numel()], [dtype], self.world_size, self.group.device)
        param.init_unsharded_param()
        free_storage(param.all_gather_outputs[0])

    def _plan(self, param: FSDPParam) -> ParamPlan:
        numel = param._sharded_param_data.numel()
        return ParamPlan(
            size_text=_write_sizes(param._orig_size),
            padded_shard_size_text=_write_sizes(param.padded_sharded_param_size),
            shard_numel_text=str(numel),
            shard_dim=param.fsdp_placement.dim,
            storage_bytes_text=str(numel * self.world_size * param._unsharded_param.itemsize),
        )

    def _plan_reduction(self) -> Reduction:
        dtype = self.group._reduce_dtype or self.params[0].param_dtype or self.params[0].orig_dtype
        pre, post, op, _ = gradient_divide_factors(
            self.group._reduce_scatter_process_group, None, dtype, self.group.device.type
        )
        return Reduction("avg" if op == dist.ReduceOp.AVG else "sum", pre, post)

    def _watch_gradient(self, index: int, unsharded: nn.Parameter) -> None:
        # Compiled autograd traces the hook where it accumulates the gradient. A plain hook would get the gradient
        # itself, but on 2.13 it breaks compiled autograd for a parameter without one.
        unsharded._compile_fsdp_owner = weakref.ref(self)  # type: ignore[attr-defined]
        if not unsharded.requires_grad or index in self.watched:
            return
        self.watched.add(index)
        unsharded.register_post_accumulate_grad_hook(partial(_gradient_accumulated, self))

    def fqn(self, unsharded: torch.Tensor) -> str:
        """The fully qualified name of one of the group's unsharded parameters."""
        return next(str(p._param_fqn) for p in self.params if p._unsharded_param is unsharded)

    # Unshard and reshard

    @property
    def is_unsharded(self) -> bool:
        return self.group._sharded_state is ShardedState.UNSHARDED

    def unshard(self) -> None:
        """All-gather the shards, allocate the unsharded parameters and fill them."""
        with torch.no_grad():
            for param, plan, value in zip(self.params, self.plans, self._gather(), strict=True):
                unsharded = param._unsharded_param
                if plan.storage_bytes > 0:
                    unsharded.untyped_storage().resize_(plan.storage_bytes)
                    # What autograd saved of the parameter is valid again once it is refilled.
                    with preserve_version_counter(unsharded):
                        copy_(unsharded, value)
                param.sharded_state = ShardedState.UNSHARDED
        self.group._sharded_state = ShardedState.UNSHARDED

    def _gather(self) -> list[torch.Tensor]:
        shards = []  # (shard_numel,) each
        for param in self.params:
            shard = param._sharded_param_data
            shards.append(shard if param.param_dtype is None else shard.to(param.param_dtype))
        if self.world_size == 1:
            return [shard.view(plan.size) for shard, plan in zip(shards, self.plans, strict=True)]
        flat = shards[0] if len(shards) == 1 else torch.cat(shards)
        launch = functional_collectives.all_gather_into_tensor(flat, self.world_size, self.group_name)
        gathered = functional_collectives.wait_tensor(launch).view(self.world_size, -1)
        splits = gathered.split([plan.shard_numel for plan in self.plans], dim=1)
        return [self._assemble(split, plan) for split, plan in zip(splits, self.plans, strict=True)]

    def _assemble(self, split: torch.Tensor, plan: ParamPlan) -> torch.Tensor:
        # split: (world_size, shard_numel), one row from each rank
        if plan.shard_dim != 0:
            shards = split.reshape(self.world_size, *plan.padded_shard_size)
            return torch.cat(shards.unbind(0), dim=plan.shard_dim)
        rows = plan.padded_shard_size[0] * self.world_size
        full = split.reshape(rows, *plan.padded_shard_size[1:])
        return full if rows == plan.size[0] else full[: plan.size[0]]

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        for param, plan in zip(self.params, self.plans, strict=True):
            if plan.storage_bytes > 0:
                param._unsharded_param.untyped_storage().resize_(0)
            param.sharded_state = ShardedState.SHARDED
        self.group._sharded_state = ShardedState.SHARDED

    def register(self, unsharded: bool) -> None:
        """Make the unsharded, or the sharded, parameters the ones that the modules hold."""
        for param in self.params:
            value = param._unsharded_param if unsharded else param.sharded_param
            info = param._module_info
            info.module._parameters[info.param_name] = value
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                module._parameters[name] = value

    # Backward

    def begin_backward(self) -> None:
        """Unshard before the first gradient computation that may need the group."""
        if self.pending > 0:
            return  # another output, or another use of the module, came first
        self.pending = len([param for param in self.params if param._unsharded_param.requires_grad])
        if not self.is_unsharded:
            self.unshard()

    def accumulate(self) -> None:
        """Count a gradient that has just been accumulated; reduce once the group is complete.

        Parameters that get no gradient leave the group incomplete: torch's own final callback then reduces
        what has arrived, at the end of the backward.
        """
        if not self.group.reduce_grads:
            return
        self.pending -= 1
        if self.pending == 0:
            self.reduce()

    def reduce(self) -> None:
        """Reshard, and reduce-scatter the gradients that have arrived."""
        self.reshard()
        if not self.group._reshard_after_forward:
            self.register(unsharded=False)
        arrived: list[int] = []
        grads: list[torch.Tensor] = []
        for index, param in enumerate(self.params):
            grad = _take_gradient(param)
            if grad is not None:
                arrived.append(index)
                grads.append(grad)
        with torch.no_grad():
            rows = [self._rows_first(i, grad) for i, grad in zip(arrived, grads, strict=True)]
            self.reduced = self._reduce_scatter(rows)
        self.reduced_params = arrived

    def _rows_first(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        # A gradient sharded on another dim is rearranged so that each rank's shard is a block of rows.
        dim = self.plans[index].shard_dim
        return grad if dim == 0 else torch.cat(grad.chunk(self.world_size, dim=dim))

    def _reduce_scatter(self, grads: list[torch.Tensor]) -> torch.Tensor:
        # Returns this rank's padded shards of all gradients, flat, one behind the other.
        reduction = self.reduction
        reduce_dtype = self.group._reduce_dtype
        if reduce_dtype is not None:
            grads = [grad.to(reduce_dtype) for grad in grads]
        flat: torch.Tensor = chunk_cat(grads, 0, self.world_size).view(-1)
        if reduction.pre_divisor is not None:
            flat = flat / reduction.pre_divisor
        if self.world_size > 1:
            launch = functional_collectives.reduce_scatter_tensor(flat, reduction.op, self.world_size, self.group_name)
            flat = functional_collectives.wait_tensor(launch)
        if reduction.post_divisor is not None:
            flat = flat / reduction.post_divisor
        return flat if self.group._orig_dtype is None else flat.to(self.group._orig_dtype)

    # After the backward, for real

    def store_gradients(self) -> None:
        """Hand the reduced gradients to the sharded parameters, as DTensors, adding to what is there."""
        flat, self.reduced = self.reduced, None
        if flat is None:
            return
        offset = 0
        for index in self.reduced_params:
            param = self.params[index]
            local = flat.as_strided(param.sharded_size, param.contiguous_sharded_stride, offset)
            offset += self.plans[index].shard_numel
            sharded = param.sharded_param
            if sharded.grad is None:
                sharded.grad = param.to_sharded_dtensor(local)
            else:
                assert isinstance(sharded.grad, DTensor)
                sharded.grad.to_local().add_(local)
            for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                hook(sharded)
        self.reduced_params = []

    def end_backward(self) -> None:
        """Forget the backward, also one that failed."""
        self.active = False
        self.pending = 0
        self.reduced = None
        self.reduced_params = []


def start_backward(state: FSDPState) -> None:
    """Begin the backward of a whole model, once, at the first thing of it that runs.

    torch's own callback, queued here, reshards and reduces at the end of the backward whatever the compiled
    graphs have left.
    """
    context = state._state_ctx
    if context.post_backward_final_callback_queued:
        return
    for each in context.all_states:
        for group in param_groups(each):
            if (traceable := getattr(group, "_compile_fsdp_traceable", None)) is not None:
                traceable.end_backward()  # of the last one, which may have left parameters without gradients
    state._register_root_post_backward_final_callback()


def owner_of(unsharded: object) -> TraceableGroup | None:
    """The group of an unsharded parameter, None for anything else."""
    owner = getattr(unsharded, "_compile_fsdp_owner", None)
    return None if owner is None else owner()


def _gradient_accumulated(group: TraceableGroup, unsharded: torch.Tensor) -> None:
    if group.active:
        group.accumulate()


def _take_gradient(param: FSDPParam) -> torch.Tensor | None:
    grad, param._unsharded_param.grad = param._unsharded_param.grad, None
    accumulated = param.unsharded_accumulated_grad  # in the reduce dtype, of earlier microbatches
    if accumulated is None:
        return grad
    param.unsharded_accumulated_grad = None
    return accumulated if grad is None else accumulated + grad
