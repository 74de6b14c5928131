"""Traced counterpart of an FSDP2 parameter group: unshard, reshard and sharded state.

[Note: One object for each backward]
A backward may reach a group through several compiled graphs, with eager code between them. All of them share one
`GroupBackward`. `start_backward` replaces it with an empty one when the next backward begins; an error or a reset does
so immediately. So no state of a backward leaks into the next backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import DTensor

from compile_fsdp.ops import all_gather_into_tensor, issue_ticket
from compile_fsdp.runtime.gather import GatherPlan, Launched, copy_in, copy_out, fill, free, wait_and_copy_out
from compile_fsdp.runtime.gradient_count import GradientCount
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.states import KNOWN, LEGAL, Memory
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time, eval_at_trace_time_guarded, inline_only
from compile_fsdp.torch_compat.distributed import functional_collectives
from compile_fsdp.torch_compat.fsdp import (
    PLAIN_ALL_GATHERS,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    forget_post_backward,
)


@dataclass(eq=False)  # not frozen, because Dynamo guards all fields of a frozen dataclass
class GroupConstants:
    """Constants that graphs depend on and that no step changes."""

    # Rank count and group name of the all-gather, and of the smaller mesh of `reshard_after_forward=<int>`; 1 and empty
    # if there is none.
    shard_count: int = 1
    gather_group: str = ""
    post_forward_count: int = 1
    post_forward_group: str = ""
    is_extended: bool = False  # whether a parameter has an all-gather extension (fsdp_pre_all_gather)
    is_tied: bool = False  # whether several modules share a parameter of the group
    text: str = ""  # counts and groups above, and each parameter's layout. See [Note: Numbers that stay numbers]


class ForwardCall(Protocol):
    """A forward through a compiled graph, as its backward sees it."""

    def is_to_come(self) -> bool:
        """Return whether the running backward has yet to go through this forward."""


class GroupBackward:
    """Data of one backward of one group. Parameters are given by their positions in the group."""

    def __init__(self) -> None:
        # Whether a compiled graph runs. If not, the gradient hooks only record the gradients that arrive.
        self.is_compiled = False
        self.gradients = GradientCount()
        # Whether the reduction waits for more gradients in this backward, from a forward whose backward is still to
        # come or from eager code between graphs.
        self.is_deferred = False
        self.prefetch_last: list[TraceableGroup] = []  # groups to gather once this group's gradients are computed
        self.arrived: list[int] = []  # parameters whose gradients the graph has reduced, until their delivery
        # These gradients, each (padded shard numel,) in its dtype; None if a later backward all-reduces them.
        self.reduced: Sequence[torch.Tensor] | None = ()
        self.divisor_text = ""  # the user's divisor, or "None". See [Note: Numbers that stay numbers]


class TraceableGroup:
    """The traced counterpart of one FSDPParamGroup."""

    def __init__(self, fsdp_group: FSDPParamGroup, state: FSDPState) -> None:
        self.fsdp_group = fsdp_group
        self.state = state  # torch's state of the module, or modules, that the group belongs to
        self.known = KNOWN  # states to compare with. See [Note: States that Dynamo guards]
        self.params: list[TraceableParam] = []  # empty until the first trace
        self.constants = GroupConstants()  # defaults until the first trace
        self.post_forward_rank: torch.Tensor | None = None  # (1,) int64, in the smaller mesh; else None
        # The parameters that the modules held before this forward, until it puts them back; else empty.
        self.saved: Sequence[nn.Parameter | None] = ()
        self.is_hidden = False  # whether the modules hold the sharded parameters of a group that a backward unsharded
        self.ahead: Launched | None = None  # a gather ahead of its use
        self.backward_prefetch: BackwardPrefetch | None = None  # when a backward gathers ahead; None for never
        self.forwards: weakref.WeakSet[ForwardCall] = weakref.WeakSet()  # forwards whose backward may still run
        self.is_cut = False  # whether any compiled graph held only a part of a forward of the group's module
        # By id of an unsharded parameter: number of the last backward in which eager code accumulated its gradient.
        self.from_eager: dict[int, int | None] = {}
        self.backward = GroupBackward()  # of the present backward. See [Note: One object for each backward]
        self.ticket = issue_ticket(self)  # (1,) int64, by which `hand_over` finds the group

    @at_run_time
    def fqn(self, unsharded_param: torch.Tensor) -> str:
        """Return the FQN of the parameter that owns this unsharded parameter or part."""
        param = self.param_of(unsharded_param).fsdp_param
        # torch gives no FQN to a parameter that was unsharded before the first forward.
        return str(param._param_fqn or param._module_info.param_name)

    @at_run_time
    def param_of(self, tensor: torch.Tensor) -> TraceableParam:
        """Return the group's parameter that owns this unsharded parameter or part."""
        return next(
            param for param in self.params if any(tensor is each for each in (param.unsharded_param, *param.filled))
        )

    @at_run_time
    def adopt_parts(self) -> None:
        """Take over the parts of tensor subclasses that eager code gathered, before a graph runs."""
        for param in self.params:
            if param.parts is not None:
                param.parts.adopt(self.is_unsharded)

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of the group gets a gradient."""
        return not any([param.unsharded_param.requires_grad for param in self.params])

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameters, unless the user sees and sets those."""
        for param in () if self.is_unsharded else self.params:
            param.follow_trainable()

    # The state

    @property
    @inline_only
    def memory(self) -> Memory:
        state = self.fsdp_group._sharded_state
        if state is self.known.unsharded:
            is_ahead = self.ahead is not None and self.ahead.output is None
            return Memory.UNSHARDED_AHEAD if is_ahead else Memory.UNSHARDED
        if self.ahead is not None and self.ahead.output is not None:
            return Memory.GATHERING
        return Memory.POST_FORWARD if state is self.known.post_forward else Memory.SHARDED

    @inline_only
    def enter(self, memory: Memory, ahead: Launched | None = None) -> None:
        """Change the state of the group's memory; `ahead` is the gather of GATHERING and UNSHARDED_AHEAD."""
        _check_step(self.memory, memory)
        if self.ahead is not ahead:
            self.ahead = ahead
        if memory is Memory.SHARDED:
            self.fsdp_group._sharded_state = self.known.sharded
        elif memory is Memory.UNSHARDED:
            self.fsdp_group._sharded_state = self.known.unsharded
        elif memory is Memory.POST_FORWARD:
            self.fsdp_group._sharded_state = self.known.post_forward

    @property
    def is_unsharded(self) -> bool:
        """Whether the group is unsharded for torch, and so for eager code."""
        return self.fsdp_group._sharded_state is self.known.unsharded

    @property
    def is_post_forward(self) -> bool:
        """Whether the group has memory over the smaller mesh, even if an all-gather is in flight."""
        return self.fsdp_group._sharded_state is self.known.post_forward

    @property
    def has_eager_slices(self) -> bool:
        """Whether the group has post-forward shards of eager code, which graphs do not read."""
        return self.is_post_forward and not (self.params and all(param.has_own_slice for param in self.params))

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameters have memory, regardless of the states."""
        return all(storage.nbytes() >= size for storage, size in self._storages())

    @at_run_time
    def allocate(self) -> None:
        """Give the unsharded parameters memory, if they have none."""
        for storage, size in self._storages():
            if storage.nbytes() < size:
                storage.resize_(size)

    def _storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """The storages of the unsharded parameters, each with its size in bytes when filled."""
        pairs = [pair for param in self.params for pair in zip(param.filled, param.storage_bytes, strict=True)]
        return [(tensor.untyped_storage(), size) for tensor, size in pairs]

    # Unshard and reshard

    def launch(self) -> None:
        """Launch the all-gather, unless it is in flight or the group is unsharded."""
        memory = self.memory
        if memory is not Memory.SHARDED and memory is not Memory.POST_FORWARD:
            return
        plan = self._gather_plan()
        inputs: list[tuple[Any, ...]] | None = None
        is_post_forward = memory is Memory.POST_FORWARD
        with torch.no_grad():
            if self.constants.is_extended and not is_post_forward:
                tensors, inputs = self._extended_inputs(plan)
            else:
                tensors = [param.gather_input(is_post_forward) for param in self.params]
            output = copy_in(tensors, plan.inputs if inputs is None else inputs, plan.device)
            if plan.shard_count > 1:
                output = self._all_gather(output, plan)
            self.enter(Memory.GATHERING, Launched(output, inputs))

    def _all_gather(self, own: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        comm = self.fsdp_group._all_gather_comm
        if isinstance(comm, PLAIN_ALL_GATHERS):
            gathered: torch.Tensor = all_gather_into_tensor(own, plan.shard_count, plan.process_group, plan.name)
            return gathered
        # Dynamo turns the collectives that a custom communicator calls into graph ops.
        process_group = self.fsdp_group._all_gather_process_group
        output = comm.allocate((own.numel() * process_group.size(),), dtype=own.dtype, device=own.device)
        comm(output_tensor=output, input_tensor=own, group=process_group, async_op=False)
        return output

    @inline_only
    def drop_launched(self) -> None:
        """Forget an all-gather in flight, even if eager code gathered the group in the meantime."""
        if self.ahead is None or self.ahead.output is None:
            return
        state = self.fsdp_group._sharded_state
        if state is self.known.unsharded:
            self.enter(Memory.UNSHARDED)
        else:
            self.enter(Memory.POST_FORWARD if state is self.known.post_forward else Memory.SHARDED)

    def _gather_plan(self) -> GatherPlan:
        return _plan_gather(self, self.constants.text, self.fsdp_group._sharded_state)

    def _extended_inputs(self, plan: GatherPlan) -> tuple[list[torch.Tensor], list[tuple[Any, ...]]]:
        tensors: list[torch.Tensor] = []
        inputs: list[tuple[Any, ...]] = []
        for param, described in zip(self.params, plan.inputs, strict=True):
            if param.extension is not None:
                own = param.extension.inputs(param.fsdp_param)
                tensors += own
                inputs += [(each.numel(), each.dtype) for each in own]
            else:
                tensors.append(param.fsdp_param._sharded_param_data)
                inputs.append(described)
        return tensors, inputs

    def unshard(self) -> None:
        """All-gather the shards, allocate the unsharded parameters and fill them."""
        self.launch()
        launched = self.ahead
        assert launched is not None and launched.output is not None
        plan, filled = self._gather_plan(), self._filled()
        with torch.no_grad():
            if launched.inputs is None:
                wait_and_copy_out(launched.output, plan.shard_count, plan.inputs, filled, plan.storage_bytes)
            else:
                output = launched.output
                if plan.shard_count > 1:
                    output = functional_collectives.wait_tensor(output)
                values = self._extended_values(copy_out(output, plan.shard_count, launched.inputs))
                fill(filled, values, plan.storage_bytes)
        if self.is_post_forward:
            self._free_post_forward()
        self.enter(Memory.UNSHARDED)

    def _extended_values(self, gathered: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        rest = list(gathered)
        for param in self.params:
            if param.extension is None:
                values.append(rest.pop(0))
            else:
                own = [rest.pop(0) for _ in param.extension.sizes]
                values += param.extension.values(param.fsdp_param, param.unsharded_param, param.parts, own)
        return values

    def _filled(self) -> list[torch.Tensor]:
        """Return the tensors that a gather fills, by a short path for Dynamo if there are no extensions."""
        if not self.constants.is_extended:
            return [param.unsharded_param for param in self.params]
        return [each for param in self.params for each in param.filled]

    @at_run_time
    def unshard_now(self) -> None:
        """Gather for a backward graph that reads the parameters but does not gather them."""
        self.fsdp_group.unshard()
        self.fsdp_group.wait_for_unshard()
        self.adopt_parts()

    @at_run_time
    def resume_unsharded(self) -> None:
        """Enter UNSHARDED without a gather if a forward left the storages filled but the states sharded.

        After a forward that ends sharded, the modules hold the sharded parameters, whose states are SHARDED. Both stay
        so, so that Dynamo neither guards nor writes them for each backward.
        """
        if not self.is_unsharded and self.is_filled:
            if self.is_post_forward:  # a memory budget has kept the parameters; the modules hold the slices
                self._free_post_forward()
            else:
                self.is_hidden = True
            self.enter(Memory.UNSHARDED)

    def reshard(self) -> None:
        """Free the unsharded parameters, or the shards of the smaller mesh."""
        if self.is_unsharded:
            self._free()
        elif self.is_post_forward:
            self._free_post_forward()
        else:
            return
        self.enter(Memory.SHARDED)

    def keep_slices(self) -> None:
        """Keep this rank's slices over the smaller mesh, and free the unsharded parameters."""
        assert self.post_forward_rank is not None
        with torch.no_grad():
            for param in self.params:
                assert param.post_forward is not None
                rank, count = self.post_forward_rank, self.constants.post_forward_count
                param.post_forward.fill(param.fsdp_param, param.unsharded_param, count, rank)
        self._free()
        self.enter(Memory.POST_FORWARD)

    def _free(self) -> None:
        free(self._filled(), self._gather_plan().storage_bytes)

    def _free_post_forward(self) -> None:
        for param in self.params:
            assert param.post_forward is not None
            param.post_forward.free(param.fsdp_param)

    # Gradients

    @at_run_time
    def receive(self, reduced: Sequence[torch.Tensor], params: Sequence[int]) -> None:
        """Add reduced gradients, each (padded shard numel,), to these parameters' gradients, and run their hooks."""
        if params:
            if (event := self.fsdp_group._post_reduce_event) is not None:
                # Eager code of this backward may still add to the gradients.
                self.fsdp_group.device_handle.current_stream().wait_event(event)
            forget_post_backward(self.fsdp_group)
        for index, flat in zip(params, reduced, strict=True):
            param = self.params[index].fsdp_param
            local = flat.as_strided(param.sharded_size, param.contiguous_sharded_stride)
            sharded = param.sharded_param
            if sharded.grad is None:
                sharded.grad = param.to_sharded_dtensor(local)
            else:
                assert isinstance(sharded.grad, DTensor)
                sharded.grad.to_local().add_(local)
            for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                hook(sharded)

    @at_run_time
    def end_backward(self) -> None:
        """Discard the data of a finished or failed backward."""
        self.backward = GroupBackward()
        self.saved, self.is_hidden = (), False
        self.drop_launched()


@eval_at_trace_time
def _check_step(before: Memory, after: Memory) -> None:
    assert before in LEGAL[after], f"an illegal step of a parameter group's memory, from {before} to {after}"


@eval_at_trace_time_guarded
def _plan_gather(group: TraceableGroup, text: str, state: ShardedState) -> GatherPlan:
    # `text` is an argument so that Dynamo guards it. See [Note: Numbers that stay numbers].
    params, constants, name = group.params, group.constants, group.fsdp_group._with_fqn("FSDP::all_gather")
    storage_bytes = [each for param in params for each in param.storage_bytes]
    if state is KNOWN.post_forward:
        inputs = [tuple(param.post_forward.layout) for param in params if param.post_forward is not None]
        return GatherPlan(name, constants.post_forward_count, constants.post_forward_group, None, inputs, storage_bytes)
    device = group.fsdp_group.device if params[0].fsdp_param.offload_to_cpu else None
    inputs = [tuple(param.layout) for param in params]
    return GatherPlan(name, constants.shard_count, constants.gather_group, device, inputs, storage_bytes)
