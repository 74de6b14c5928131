"""One parameter group of FSDP2 while it is traced: gather, free, reduce.

[Note: Traced and eager branch share the state]
Every tensor and every state below belongs to torch's own FSDPParamGroup and FSDPParam: the sharded parameter,
its padded local data, the unsharded parameter and the group's ShardedState. A traced step leaves them as an
eager step would, so that the next step may run either way. What this file adds to them lives only between the
start and the end of one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import DTensor

from compile_fsdp.compat import (
    PLAIN_ALL_GATHERS,
    PLAIN_REDUCE_SCATTERS,
    FSDPMeshInfo,
    FSDPParamGroup,
    FSDPState,
    ShardedState,
    TrainingState,
    accumulates_into,
    after_backward,
    describe_partial_output,
    functional_collectives,
    local_tensor,
    param_groups,
    reduce_dtype,
    reduces_unused,
    runs_while_tracing,
    runs_while_tracing_for,
)
from compile_fsdp.ops import all_gather_into_tensor, hand_over, issue_ticket
from compile_fsdp.runtime import communicators
from compile_fsdp.runtime.calls import outermost
from compile_fsdp.runtime.gather import GatherPlan, Launched, arrive, fill, free, pack, unpack
from compile_fsdp.runtime.gradient_count import GradientCount
from compile_fsdp.runtime.parameter import TraceableParam
from compile_fsdp.runtime.reduction import Reduction, all_reduce, part, plan_reduction, reduce_scatter
from compile_fsdp.runtime.states import KNOWN, enter, params_follow


class BackwardCall(Protocol):
    """A forward through compiled graphs, as far as its backward is concerned."""

    def is_to_come(self) -> bool:
        """Whether the backward that runs now will reach it."""


class TraceableGroup:
    """The traced branch of one FSDPParamGroup.

    Attributes:
        active: True while a compiled backward runs; the gradient hooks do nothing otherwise.
        gradients: Counts them in a compiled backward.
        modules_hold_shards: Whether the modules hold the sharded parameters all through this backward.
        is_resumed: Whether this backward began with parameters that its forward has left unsharded behind the states.
        held: By parameter, what its module held before this forward, which puts it back; else empty.
        is_cut: Whether a compiled graph has ever held but a part of a forward of the group's module.
        deferred: More gradients follow in this backward, of another forward or of eager code between graphs, and these
            are reduced with them.
        backward_prefetch: When a backward gathers the groups that it needs next; None for no prefetch.
        prefetch_last: What to gather once this group's gradients are computed.
        launched: An all-gather that was launched ahead of its use.
        is_ahead: Whether eager code has unsharded the group ahead of a use that is still to come.
        calls: Forwards through the group whose backward may still come.
    """

    def __init__(self, group: FSDPParamGroup, state: FSDPState) -> None:
        self.group = group
        self.state = state
        self.known = KNOWN  # see [Note: States that Dynamo guards]
        group._compile_fsdp_traceable = self  # type: ignore[attr-defined]
        self.params = [TraceableParam(param) for param in group.fsdp_params]
        self.shard_count = 1  # ranks that the parameters are sharded over
        self.gather_group = ""
        self.post_forward_count = 1  # ranks of the smaller mesh, with reshard_after_forward=<int>
        self.post_forward_group = ""
        # All numbers that a graph depends on. As numbers, those that differ from module to module would become symbols
        # where Dynamo compiles a hook as a frame of its own, and Inductor resizes a storage to a plain number only.
        self.plan_text = ""
        self.gather_name = self.reduce_name = ""  # of the ranges in a profile, as eager FSDP2 names them
        self.is_extended = False
        self.post_forward_rank: torch.Tensor | None = None  # (1,) int64
        self.watched: set[int] = set()  # parameters whose gradient hook is registered
        self.launched: Launched | None = None
        self.is_ahead = False
        self.calls: weakref.WeakSet[BackwardCall] = weakref.WeakSet()
        self.active = False
        self.gradients = GradientCount()
        self.modules_hold_shards = False
        self.is_resumed = False
        self.held: Sequence[nn.Parameter | None] = ()
        self.is_tied = any(param._module_info.shared_modules for param in group.fsdp_params)
        self.is_cut = False
        self.deferred = False
        self.backward_prefetch: BackwardPrefetch | None = None
        self.prefetch_last: list[TraceableGroup] = []
        self.reduced: Sequence[torch.Tensor] = ()  # by parameter, (padded shard numel,), in the parameters' dtype
        self.reduced_params: list[int] = []
        self.unreplicated_params: list[int] = []  # whose gradients await a later backward's all-reduce
        self.ticket = issue_ticket(self)

    # Setting up, for real and before anything is traced

    def prepare(self) -> None:
        """Create the unsharded parameters, empty, and the constants that tracing needs."""
        group = self.group
        if isinstance(group.mesh_info, FSDPMeshInfo):
            process_group = group.mesh_info.shard_process_group
            self.shard_count, self.gather_group = process_group.size(), process_group.group_name
        # Created under inference_mode they would be inference tensors, and training would never work again.
        with torch.inference_mode(False), torch.no_grad():
            for param in self.params:
                param.prepare(self.shard_count, group.device)
            if group._use_post_forward_mesh:
                self._prepare_post_forward()
        for index, param in enumerate(self.params):
            self._watch_gradient(index, param.leaf)
        self.is_extended = any(param.extended for param in self.params)
        routes = (self.shard_count, self.gather_group, self.post_forward_count, self.post_forward_group)
        self.plan_text = repr((routes, [param.plan for param in self.params]))
        self.gather_name = group._with_fqn("FSDP::all_gather")
        self.reduce_name = group._with_fqn("FSDP::post_backward_reduce")

    def _prepare_post_forward(self) -> None:
        mesh_info = self.group.post_forward_mesh_info
        assert mesh_info is not None
        process_group = mesh_info.shard_process_group
        self.post_forward_count, self.post_forward_group = process_group.size(), process_group.group_name
        self.post_forward_rank = torch.tensor([mesh_info.shard_mesh_rank], device=self.group.device)
        for param in self.params:
            param.prepare_post_forward(self.post_forward_count)

    def _watch_gradient(self, index: int, leaf: nn.Parameter) -> None:
        # Compiled autograd traces the hook where it accumulates the gradient. A plain hook would get the gradient
        # itself, but on 2.13 it breaks compiled autograd for a parameter without one.
        leaf._compile_fsdp_owner = weakref.ref(self)  # type: ignore[attr-defined]
        if not leaf.requires_grad or index in self.watched:
            return
        self.watched.add(index)
        # A weak reference: the garbage collector does not see that a tensor in C++ holds its hooks.
        leaf.register_post_accumulate_grad_hook(partial(_gradient_accumulated, weakref.ref(self)))

    def fqn(self, leaf: torch.Tensor) -> str:
        """The fully qualified name of one of the group's unsharded parameters."""
        return next(str(param.param._param_fqn) for param in self.params if param.leaf is leaf)

    # Unshard and reshard

    @property
    def is_unsharded(self) -> bool:
        return self.group._sharded_state is self.known.unsharded

    @property
    def is_post_forward(self) -> bool:
        return self.group._sharded_state is self.known.post_forward

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of the group gets a gradient."""
        return not any([param.leaf.requires_grad for param in self.params])

    def launch(self) -> None:
        """Send the shards ahead of their use; nothing if they are on their way or already there."""
        if self.launched is not None or self.is_unsharded:
            return
        plan = self._gather_plan()
        with torch.no_grad():
            if self._is_extended_now():
                tensors, inputs = self._extended_inputs(plan)
            else:
                tensors, inputs = [param.gather_input(self.is_post_forward) for param in self.params], plan.inputs
            output = pack(tensors, inputs, plan.device)
            if plan.shard_count > 1 and not isinstance(self.group._all_gather_comm, PLAIN_ALL_GATHERS):
                output = communicators.gather(self.group, output)
            elif plan.shard_count > 1:
                output = all_gather_into_tensor(output, plan.shard_count, plan.process_group, self.gather_name)
            self.launched = Launched(output, inputs if self._is_extended_now() else None)

    def _gather_plan(self) -> GatherPlan:
        # The text goes in for Dynamo to guard on.
        return _plan_gather(self, self.plan_text, self.group._sharded_state)

    def _is_extended_now(self) -> bool:
        return self.is_extended and not self.is_post_forward

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
        leaves = [param.leaf for param in self.params]
        with torch.no_grad():
            if self._is_extended_now():
                assert launched.inputs is not None
                output = launched.output
                if plan.shard_count > 1:
                    output = functional_collectives.wait_tensor(output)
                gathered = unpack(output, plan.shard_count, launched.inputs)
                fill(leaves, self._extended_values(gathered), plan.storage_bytes)
            else:
                arrive(launched.output, plan.shard_count, plan.inputs, leaves, plan.storage_bytes)
        if self.is_post_forward:
            for param in self.params:
                param.free_post_forward()
        enter(self, self.known.unsharded)

    def _extended_values(self, gathered: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values, first = [], 0
        for param in self.params:
            count = len(param.gather_sizes) if param.extended else 1
            parts = list(gathered[first : first + count])
            values.append(param.extended_value(parts) if param.extended else parts[0])
            first += count
        return values

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        if self.group._sharded_state is self.known.sharded:
            return
        if self.is_post_forward:
            for param in self.params:
                param.free_post_forward()
        else:
            self._free()
        enter(self, self.known.sharded)

    def _free(self) -> None:
        free([param.leaf for param in self.params], self._gather_plan().storage_bytes)

    def reshard_after_forward(self) -> None:
        """Free the unsharded parameters as far as the group's setting has it, and register what is left."""
        mesh_info = self.group.post_forward_mesh_info
        if mesh_info is None:
            for param in self.params:
                param.register_kept()
        elif mesh_info is not self.group.mesh_info:
            assert self.post_forward_rank is not None
            with torch.no_grad():
                for param in self.params:
                    param.keep_slice(self.post_forward_count, self.post_forward_rank)
                    param.register_post_forward()
            self._free()
            enter(self, self.known.post_forward)
            params_follow(self)
        else:
            self.reshard()
            if len(self.held) > 0:  # without a look at the first
                self._put_back()
            else:
                self.register_sharded()

    def hold(self) -> None:
        """Remember what the modules hold, if it is what they are to hold after the forward.

        For Dynamo a dict that gets back what it had has not changed. It neither writes it after each step, nor makes
        the sharded parameters inputs of the graph, nor guards them. Here, not in the parameters, since Dynamo takes a
        millisecond for each function that it goes into.
        """
        is_freed = self.group.post_forward_mesh_info is self.group.mesh_info
        if is_freed and not self.is_tied and not self.is_post_forward and _runs_for_real():
            infos = [param.param._module_info for param in self.params]
            self.held = [info.module._parameters[info.param_name] for info in infos]

    def _put_back(self) -> None:
        for param, value in zip(self.params, self.held, strict=True):
            info = param.param._module_info
            info.module._parameters[info.param_name] = value
        self.held = ()

    def register_unsharded(self) -> None:
        if len(self.held) == 0:  # or they are back in their state when anything looks
            params_follow(self)
        for param in self.params:
            param.register_unsharded()

    def register_sharded(self) -> None:
        params_follow(self)
        for param in self.params:
            param.register_sharded()

    # Backward

    def resume_unsharded(self) -> None:
        """For real: enter the state in which a forward has left the storages, that the states do not know of.

        Whatever has freed them since, another forward for example, has made them sharded. The modules hold the sharded
        parameters, as after every forward that ends so, and the parameters' states say so; they stay as they are until
        the group is sharded again, so that Dynamo neither guards nor writes them for each backward.
        """
        if not self.is_unsharded and self.is_filled:
            enter(self, self.known.unsharded)
            self.is_resumed = True

    @property
    def is_filled(self) -> bool:
        """Whether the unsharded parameters have their memory, whatever the states say."""
        return all(param.is_filled for param in self.params)

    def unshard_now(self) -> None:
        """For real: gather for a backward graph that reads the parameters and does not gather them itself."""
        self.group.unshard()
        self.group.wait_for_unshard()

    def expect(self, read: Sequence[torch.Tensor], cut_forward: object) -> None:
        """For real: settle how many gradients complete the group in the compiled backward that runs next.

        Args:
            read: The unsharded parameters that its forward graph computes with.
            cut_forward: None if that graph holds the whole forward of the group's module. Else which forward it is a
                piece of: the group is complete, and may be freed, only when all its parameters have their gradients. So
                it is where torch reduces zeros for those that are not used.
        """
        needs_all = cut_forward is not None or reduces_unused(self.group)
        self.gradients.expect(read, [param.leaf for param in self.params] if needs_all else [], cut_forward)

    def awaits_eager_gradients(self) -> bool:
        """For real, in a backward: whether eager code of a forward that was cut has gradients still to come."""
        leaves = [param.leaf for param in self.params if param.leaf.requires_grad] if self.is_cut else []
        return any(accumulates_into(leaf) and id(leaf) not in self.gradients.from_eager for leaf in leaves)

    def begin_backward(self, then_prefetch: list[TraceableGroup]) -> None:
        """Unshard before the first gradient computation that may need the group.

        Args:
            then_prefetch: Groups to gather next, before this group's gradients are computed or after.
        """
        if self.gradients.pending:
            return  # another output, or another use of the module, came first
        self.group._training_state = TrainingState.PRE_BACKWARD
        self.gradients.start()
        self.modules_hold_shards = self.is_resumed or self.group._sharded_state is self.known.sharded
        if self.group.unshard_in_backward and not self.is_unsharded:
            self.unshard()
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self.prefetch_last = then_prefetch
        else:
            _prefetch(then_prefetch)

    def accumulate(self) -> None:
        """Count a gradient that has just been accumulated; reduce once the group is complete.

        Parameters that are read and get no gradient leave the group incomplete: torch's own final callback then
        reduces what has arrived, at the end of the backward.
        """
        if not self.gradients.arrive():
            return
        _prefetch(self.prefetch_last)
        self.prefetch_last = []
        self._reshard_after_backward()
        if self.deferred:
            # Or torch's own hooks, if the other backward is an eager one, would take the group for unsharded.
            self.group._training_state = TrainingState.IDLE
        elif self.group.reduce_grads:
            self.reduce()

    def end_frozen(self) -> None:
        """Reshard a frozen group once the gradients of its module's inputs are there."""
        if self.active and self.is_frozen:
            self._reshard_after_backward()

    def _reshard_after_backward(self) -> None:
        needed_again = self.deferred and not self.group._reshard_after_forward
        if self.group.reshard_after_backward and not needed_again:
            self.reshard()
            if not self.modules_hold_shards:
                self.register_sharded()
        else:
            params_follow(self)

    def reduce(self) -> None:
        """Reduce the gradients that have arrived."""
        # Nothing is left to do for torch's final callback.
        self.group._training_state = TrainingState.POST_BACKWARD
        arrived: list[int] = []
        grads: list[torch.Tensor] = []
        for index, param in enumerate(self.params):
            grad = param.take_gradient()
            if grad is not None:
                arrived.append(index)
                grads.append(grad)
        with torch.no_grad():
            dims, numels = _shard_layout(self, self.plan_text)
            rows = [self._rows_first(dims[i], grad) for i, grad in zip(arrived, grads, strict=True)]
            flat = self._reduce(rows, self.params[arrived[0]].param.orig_dtype)
            reduced = () if flat is None else part(flat, [numels[i] for i in arrived])
        if flat is not None and _has_gradient_hooks(self):
            hand_over(reduced, self.ticket, arrived)
        else:
            self.reduced, self.reduced_params = reduced, arrived if flat is not None else []
            self.unreplicated_params = arrived if flat is None else []

    def _rows_first(self, dim: int, grad: torch.Tensor) -> torch.Tensor:
        # A gradient sharded on another dim is rearranged so that each rank's shard is a block of rows.
        return grad if dim == 0 or self.shard_count == 1 else torch.cat(grad.chunk(self.shard_count, dim=dim))

    def _reduce(self, grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
        # None if the all-reduce is left to a later backward.
        group = self.group
        wanted = reduce_dtype(group, dtype)
        if wanted is not None:
            grads = [grad.to(wanted) for grad in grads]
        # The settings go in as arguments for Dynamo to guard on: it traces again when one has changed.
        own_group = getattr(group.mesh_info, "reduce_scatter_process_group", None)
        settings = group.gradient_divide_factor, group.force_sum_reduction_for_comms, own_group
        reduction = _reduction(self, grads[0].dtype, *settings)
        plain = isinstance(group._reduce_scatter_comm, PLAIN_REDUCE_SCATTERS)
        custom = None if plain else partial(communicators.reduce, group)
        flat = reduce_scatter(grads, reduction, self.reduce_name, custom)
        if reduction.replica_group:
            partial_output = group._partial_reduce_output
            if partial_output is not None:
                flat = flat + partial_output
            if not group.all_reduce_grads:
                group._partial_reduce_output = flat
                return None
            group._partial_reduce_output = None
            flat = all_reduce(flat, reduction)
        if group._all_reduce_hook is not None:
            group._all_reduce_hook(flat)
        if reduction.post_divisor is not None:
            flat = flat / reduction.post_divisor
        flat = flat.to(dtype)
        return flat.to("cpu") if self.params[0].param.offload_to_cpu else flat

    # After the backward, for real

    def store_gradients(self) -> None:
        """Hand the reduced gradients to the sharded parameters, as DTensors, adding to what is there."""
        for traceable in self.params:
            traceable.hand_back_gradient()
        reduced, params = self.reduced, self.reduced_params
        self.reduced, self.reduced_params = (), []
        if self.unreplicated_params:
            describe_partial_output(self.group, [self.params[index].param for index in self.unreplicated_params])
            self.unreplicated_params = []
        self.receive(reduced, params)

    def check_nan(self) -> None:
        """For anomaly mode: refuse gradients that are NaN.

        Raises:
            RuntimeError: one is, as torch's own check raises.
        """
        for traceable in self.params:
            grad = traceable.param.sharded_param.grad
            if grad is not None and local_tensor(grad).isnan().any():
                raise RuntimeError(f"expected no nan in the gradient of {traceable.param._param_fqn}, got some")

    def receive(self, reduced: Sequence[torch.Tensor], params: Sequence[int]) -> None:
        """For real: add gradients to the sharded parameters', and run the hooks on those.

        Args:
            reduced: For each parameter, (numel of its padded shard,).
            params: Positions of the parameters.
        """
        for index, flat in zip(params, reduced, strict=True):
            param = self.params[index].param
            local = flat.as_strided(param.sharded_size, param.contiguous_sharded_stride)
            sharded = param.sharded_param
            if sharded.grad is None:
                sharded.grad = param.to_sharded_dtensor(local)
            else:
                assert isinstance(sharded.grad, DTensor)
                sharded.grad.to_local().add_(local)
            for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                hook(sharded)

    def end_backward(self) -> None:
        """Forget the backward, also one that failed."""
        self.active = False
        self.gradients.forget()
        self.modules_hold_shards = False
        self.is_resumed = False
        self.held = ()
        self.deferred = False
        self.prefetch_last = []
        self.launched = None
        self.reduced = ()
        self.reduced_params = []
        self.unreplicated_params = []

    def reset(self) -> None:
        """Shard the group wherever an exception has left it, and drop the gradients of the interrupted step.

        An interrupted graph has changed storages, but none of the states; an interrupted eager backward has left
        gradients that the next one would add to.
        """
        self.end_backward()
        self.calls.clear()
        self.is_ahead = False
        for param in self.params:
            param.reset()
        self.group._sharded_state = self.known.sharded


def _prefetch(groups: list[TraceableGroup]) -> None:
    for group in groups:
        if group.group.unshard_in_backward:
            group.launch()


@runs_while_tracing_for
def _plan_gather(group: TraceableGroup, plan_text: str, state: ShardedState) -> GatherPlan:
    params = group.params
    storage_bytes = [param.plan.storage_bytes for param in params]
    if state is KNOWN.post_forward:
        inputs = [tuple(param.post_forward_input()) for param in params]
        return GatherPlan(group.post_forward_count, group.post_forward_group, None, inputs, storage_bytes)
    device = group.group.device if params[0].param.offload_to_cpu else None
    inputs = [tuple(param.input()) for param in params]
    return GatherPlan(group.shard_count, group.gather_group, device, inputs, storage_bytes)


@runs_while_tracing_for
def _shard_layout(group: TraceableGroup, plan_text: str) -> tuple[list[int], list[int]]:
    plans = [param.plan for param in group.params]
    return [plan.shard_dim for plan in plans], [plan.shard_numel for plan in plans]


@runs_while_tracing
def _runs_for_real() -> bool:
    """Whether a root is called outside of what is traced, which compares with the sharded parameters before each step.

    Otherwise graphs must read them for Dynamo to guard them: whether they need a gradient may change.
    """
    return outermost() is not None


@runs_while_tracing_for
def _has_gradient_hooks(group: TraceableGroup) -> bool:
    # Not guarded: hooks that come later run after the graph.
    return any(each.param.sharded_param._post_accumulate_grad_hooks for each in group.params)


@runs_while_tracing_for
def _reduction(group: TraceableGroup, dtype: torch.dtype, *settings: object) -> Reduction:
    return plan_reduction(group.group, dtype)


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
    after_backward(partial(_drop_gathered, context.all_states))


def _drop_gathered(states: Sequence[FSDPState]) -> None:
    """Drop what the backward has gathered and not freed, behind torch's own callback.

    Gathers sent ahead for modules whose backward did not come, and modules that eager code of a checkpoint ran again
    behind their backward: torch takes that for over. Parameters may change until the next forward, which would compute
    with the old values.
    """
    for state in states:
        for group in param_groups(state):
            if (traceable := getattr(group, "_compile_fsdp_traceable", None)) and traceable.launched is not None:
                functional_collectives.wait_tensor(traceable.launched.output)
                traceable.launched = None
            reshard_left(group)


def reshard_left(group: FSDPParamGroup) -> None:
    """For real, at the end of a backward: shard what it has left unsharded, and was not asked to."""
    if group.is_unsharded and group.reshard_after_backward:
        group.reshard()


def owner_of(leaf: object) -> TraceableGroup | None:
    """The group of an unsharded parameter, None for anything else."""
    owner = getattr(leaf, "_compile_fsdp_owner", None)
    return None if owner is None else owner()


def _gradient_accumulated(owner: weakref.ref[TraceableGroup], leaf: torch.Tensor) -> None:
    group = owner()
    if group is not None and group.active:
        group.accumulate()
    elif group is not None:
        group.gradients.seen.add(id(leaf))
        group.gradients.from_eager.add(id(leaf))
