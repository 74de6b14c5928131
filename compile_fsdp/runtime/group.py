"""Traced counterpart of an FSDP2 parameter group: unshard, reshard and sharded state.

[Note: Traced and eager branch share the state]
Every tensor and every state below belongs to torch's own FSDPParamGroup and FSDPParam: the sharded parameter,
its padded local data, the unsharded parameter and the group's ShardedState. A traced step leaves them as an
eager step would, so that the next step may run either way. State that this project adds to them lives only between
the start and the end of one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import DTensor

from compile_fsdp.ops import all_gather_into_tensor, issue_ticket
from compile_fsdp.runtime import communicators, states
from compile_fsdp.runtime.attached import set_group, set_owner
from compile_fsdp.runtime.backward import ForwardCalls, GroupBackward, gradient_accumulated
from compile_fsdp.runtime.gather import GatherPlan, Launched, copy_in, copy_out, fill, free, wait_and_copy_out
from compile_fsdp.runtime.group_names import name_in_graphs
from compile_fsdp.runtime.module_params import ModuleParams
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.reduction import process_groups
from compile_fsdp.runtime.states import KNOWN
from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time_guarded, guarded_text
from compile_fsdp.torch_compat.distributed import functional_collectives
from compile_fsdp.torch_compat.fsdp import (
    PLAIN_ALL_GATHERS,
    FSDPMeshInfo,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    await_post_reduce,
    forget_post_backward,
)


class GroupConstants:
    """Constants that graphs depend on and that no step changes.

    Attributes:
        shard_count: Number of ranks that the parameters are sharded over.
        gather_group: Name of the process group of these ranks in graphs; empty if there is no collective.
        post_forward_count: Number of ranks of the smaller mesh, with `reshard_after_forward=<int>`; else 1.
        post_forward_group: Name of the process group of the smaller mesh in graphs; empty without one.
        gather_name: Name of the all-gather in a profile, equal to eager FSDP2's name.
        reduce_name: Name of the reduce-scatter in a profile, equal to eager FSDP2's name.
        is_extended: Whether a parameter has an all-gather extension (fsdp_pre_all_gather).
        text: Rank counts and process groups above, and all `ParamPlan`s. See [Note: Numbers that stay numbers].
    """

    def __init__(self) -> None:
        self.shard_count = 1
        self.gather_group = ""
        self.post_forward_count = 1
        self.post_forward_group = ""
        self.gather_name = self.reduce_name = ""
        self.is_extended = False
        self.text = ""


class TraceableGroup:
    """The traced counterpart of one FSDPParamGroup.

    Attributes:
        fsdp_group: torch's group, which holds the state.
        state: torch's state of the module, or modules, that the group belongs to.
        known: States to compare with. See [Note: States that Dynamo guards].
        params: The group's parameters.
        constants: Constants that graphs depend on.
        post_forward_rank: (1,) int64, this rank in the smaller mesh; None without a smaller mesh.
        modules: The parameters that the group's modules hold.
        launched: All-gather launched ahead of its use; None if none is in flight.
        is_ahead: Whether eager code unsharded the group ahead of a use that is still to come.
        backward_prefetch: When a backward gathers the groups that it needs next; None for no prefetch.
        forwards: Forwards through the group.
        backward: State of the present backward; replaced when the next backward begins.
        ticket: (1,) int64, by which `hand_over` finds the group.
    """

    def __init__(self, fsdp_group: FSDPParamGroup, state: FSDPState) -> None:
        self.fsdp_group = fsdp_group
        self.state = state
        self.known = KNOWN
        set_group(fsdp_group, self)
        self.params = [TraceableParam(param) for param in fsdp_group.fsdp_params]
        self.constants = GroupConstants()
        self.post_forward_rank: torch.Tensor | None = None
        self.modules = ModuleParams(self.params)
        self.launched: Launched | None = None
        self.is_ahead = False
        self.backward_prefetch: BackwardPrefetch | None = None
        self.forwards = ForwardCalls()
        self.backward = GroupBackward()
        self.ticket = issue_ticket(self)

    # Setup, before anything is traced

    @at_run_time
    def prepare(self) -> None:
        """Create the empty unsharded parameters, and the constants that tracing needs."""
        fsdp_group, constants = self.fsdp_group, self.constants
        if isinstance(fsdp_group.mesh_info, FSDPMeshInfo):
            process_group = fsdp_group.mesh_info.shard_process_group
            constants.shard_count, constants.gather_group = process_group.size(), name_in_graphs(process_group)
        for each in filter(None, process_groups(fsdp_group)):
            name_in_graphs(each)  # here, so that names do not depend on the order of tracing
        # Without this, parameters created under inference_mode would be inference tensors, which cannot be trained.
        with torch.inference_mode(False), torch.no_grad():
            for param in self.params:
                param.prepare(constants.shard_count, fsdp_group.device)
            if fsdp_group._use_post_forward_mesh:
                self._prepare_post_forward()
        for param in self.params:
            for tensor in (param.unsharded_param, *param.filled):
                set_owner(tensor, self)
            # A weak reference, because the garbage collector does not see hooks that a tensor holds in C++.
            param.watch_gradient(partial(gradient_accumulated, weakref.ref(self)))
        constants.is_extended = any(param.extended for param in self.params)
        routes = (
            *(constants.shard_count, constants.gather_group),
            *(constants.post_forward_count, constants.post_forward_group),
        )
        constants.text = guarded_text((routes, [param.plan for param in self.params]))
        constants.gather_name = fsdp_group._with_fqn("FSDP::all_gather")
        constants.reduce_name = fsdp_group._with_fqn("FSDP::post_backward_reduce")

    @at_run_time
    def _prepare_post_forward(self) -> None:
        mesh_info, constants = self.fsdp_group.post_forward_mesh_info, self.constants
        assert mesh_info is not None
        process_group = mesh_info.shard_process_group
        constants.post_forward_count = process_group.size()
        constants.post_forward_group = name_in_graphs(process_group)
        self.post_forward_rank = torch.tensor([mesh_info.shard_mesh_rank], device=self.fsdp_group.device)
        for param in self.params:
            param.prepare_post_forward(constants.post_forward_count)

    @at_run_time
    def fqn(self, unsharded_param: torch.Tensor) -> str:
        """Return the FQN of the parameter that owns this unsharded parameter or part."""
        return str(self.param_of(unsharded_param).fsdp_param._param_fqn)

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

    # The state

    @property
    def is_unsharded(self) -> bool:
        return self.fsdp_group._sharded_state is self.known.unsharded

    @property
    def is_post_forward(self) -> bool:
        return self.fsdp_group._sharded_state is self.known.post_forward

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of the group gets a gradient."""
        return not any([param.unsharded_param.requires_grad for param in self.params])

    @at_run_time
    def follow_trainable(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameters."""
        for param in self.params:
            param.follow_trainable()

    # Unshard

    def launch(self) -> None:
        """Launch the all-gather, unless it is in flight or the group is unsharded."""
        if self.launched is not None or self.is_unsharded:
            return
        plan = self._gather_plan()
        with torch.no_grad():
            if self._is_extended_now():
                tensors, inputs = self._extended_inputs(plan)
            else:
                tensors, inputs = [param.gather_input(self.is_post_forward) for param in self.params], plan.inputs
            output = copy_in(tensors, inputs, plan.device)
            if plan.shard_count > 1 and not isinstance(self.fsdp_group._all_gather_comm, PLAIN_ALL_GATHERS):
                output = communicators.gather(self.fsdp_group, output)
            elif plan.shard_count > 1:
                name = self.constants.gather_name
                output = all_gather_into_tensor(output, plan.shard_count, plan.process_group, name)
            self.launched = Launched(output, inputs if self._is_extended_now() else None)

    def _gather_plan(self) -> GatherPlan:
        return _plan_gather(self, self.constants.text, self.fsdp_group._sharded_state)

    def _is_extended_now(self) -> bool:
        return self.constants.is_extended and not self.is_post_forward

    def _extended_inputs(self, plan: GatherPlan) -> tuple[list[torch.Tensor], list[tuple[Any, ...]]]:
        tensors: list[torch.Tensor] = []
        inputs: list[tuple[Any, ...]] = []
        for param, described in zip(self.params, plan.inputs, strict=True):
            if param.extended:
                own = param.extended_inputs()
                tensors += own
                inputs += [(each.numel(), each.dtype) for each in own]
            else:
                tensors.append(param.gather_input(self.is_post_forward))
                inputs.append(described)
        return tensors, inputs

    def unshard(self) -> None:
        """All-gather the shards, allocate the unsharded parameters and fill them."""
        self.launch()
        launched, self.launched = self.launched, None
        assert launched is not None
        plan = self._gather_plan()
        filled = self._filled()
        with torch.no_grad():
            if self._is_extended_now():
                assert launched.inputs is not None
                output = launched.output
                if plan.shard_count > 1:
                    output = functional_collectives.wait_tensor(output)
                values = self._extended_values(copy_out(output, plan.shard_count, launched.inputs))
                fill(filled, values, plan.storage_bytes)
            else:
                wait_and_copy_out(launched.output, plan.shard_count, plan.inputs, filled, plan.storage_bytes)
        if self.is_post_forward:
            for param in self.params:
                param.free_post_forward()
        states.enter(self, self.known.unsharded)

    def _extended_values(self, gathered: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        first = 0
        for param in self.params:
            count = len(param.gather_sizes) if param.extended else 1
            own = list(gathered[first : first + count])
            values += param.extended_values(own) if param.extended else own
            first += count
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

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameters have memory, regardless of the states."""
        return all(param.is_filled for param in self.params)

    @at_run_time
    def resume_unsharded(self) -> None:
        """Enter UNSHARDED without a gather if a forward left the storages filled but the states sharded.

        If the storages are freed, for example by a later forward, the group stays sharded. The modules hold the sharded
        parameters and the parameters' states are SHARDED, as after every forward that ends sharded. Both stay so until
        the group is sharded again, so that Dynamo neither guards nor writes them for each backward.
        """
        if not self.is_unsharded and self.is_filled:
            states.enter(self, self.known.unsharded)
            self.modules.keep_sharded(self)

    # Reshard

    def reshard(self) -> None:
        """Free the unsharded parameters, or the shards of the smaller mesh."""
        if self.fsdp_group._sharded_state is self.known.sharded:
            return
        if self.is_post_forward:
            for param in self.params:
                param.free_post_forward()
        else:
            self._free()
        states.enter(self, self.known.sharded)

    def _free(self) -> None:
        free(self._filled(), self._gather_plan().storage_bytes)

    def reshard_after_forward(self) -> None:
        """Apply the group's `reshard_after_forward`, and register the parameters that it leaves."""
        mesh_info = self.fsdp_group.post_forward_mesh_info
        if mesh_info is self.fsdp_group.mesh_info:
            self.reshard()
            self.modules.restore(self)
        elif mesh_info is None:
            self.modules.register_left_unsharded(self)
        else:
            assert self.post_forward_rank is not None
            with torch.no_grad():
                for param in self.params:
                    param.keep_slice(self.constants.post_forward_count, self.post_forward_rank)
            self._free()
            states.enter(self, self.known.post_forward)
            self.modules.register_post_forward(self)

    # Between backwards

    @at_run_time
    def receive(self, reduced: Sequence[torch.Tensor], params: Sequence[int]) -> None:
        """Add reduced gradients to the sharded parameters' DTensor gradients, and run the gradient hooks.

        Args:
            reduced: For each parameter, (padded shard numel,), in the dtype of the parameter's gradient.
            params: Positions of the parameters.
        """
        if params:
            await_post_reduce(self.fsdp_group)  # eager code of this backward may still add to the gradients
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
        """Discard the state of a finished or failed backward."""
        self.backward = GroupBackward()
        self.modules.forget()
        self.launched = None

    @at_run_time
    def reset(self) -> None:
        """Shard the group after an exception, and drop the gradients of the interrupted step.

        An interrupted graph changes storages but no states. An interrupted eager backward leaves gradients, to which
        the next backward would add.
        """
        self.end_backward()
        self.forwards.calls.clear()
        self.is_ahead = False
        states.reset(self)
        for param in self.params:
            param.reset()


@eval_at_trace_time_guarded
def _plan_gather(group: TraceableGroup, text: str, state: ShardedState) -> GatherPlan:
    # `text` is an argument so that Dynamo guards it. See [Note: Numbers that stay numbers].
    params, constants = group.params, group.constants
    storage_bytes = [each for param in params for each in param.plan.storage_bytes]
    if state is KNOWN.post_forward:
        inputs = [tuple(param.post_forward_input()) for param in params]
        return GatherPlan(constants.post_forward_count, constants.post_forward_group, None, inputs, storage_bytes)
    device = group.fsdp_group.device if params[0].fsdp_param.offload_to_cpu else None
    inputs = [tuple(param.input()) for param in params]
    return GatherPlan(constants.shard_count, constants.gather_group, device, inputs, storage_bytes)
