"""Run one step of a model on fake tensors and record allocations and the points at which FSDP2 acts.

The model runs unsharded, as each rank computes it. Hooks in the places of FSDP2's hooks mark where FSDP2 would gather,
free and reduce; schedule.py adds what FSDP2 allocates there. Of a stage of a pipeline, several microbatches run, in
the order of its schedule.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compile_fsdp.errors import EstimateError
from compile_fsdp.runtime.outputs import cast_floating
from compile_fsdp.tools.planning.pipelines import WHOLE, Place
from compile_fsdp.torch_compat.dispatch import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from compile_fsdp.wrap import Group, Plan

# Fake CPU tensors have memory-efficient attention, which meta tensors do not, and need no GPU.
DEVICE = torch.device("cpu")

Batch = Mapping[str, Any]


class Point(enum.Enum):
    """A point in a step at which FSDP2 acts on a group."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()
    FORWARD_END = enum.auto()  # the forward of the whole model, or of a stage, is over
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()  # the group's gradients are computed
    GRADIENTS_FREED = enum.auto()  # the gradients have been copied into the reduce-scatter input
    ACCUMULATED = enum.auto()  # unsharded gradients of a microbatch are added, all but the last of them freed
    ROUND = enum.auto()  # a pipeline's repeated backward and forward begin or end


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a step, and the group that FSDP2 would act on.

    Attributes:
        point: Kind of the point.
        group: Index of the group in the plan, -1 for the whole model.
        reduced: FQNs of the group's parameters that have a gradient, at the last points of a backward.
    """

    point: Point
    group: int = -1
    reduced: tuple[str, ...] = ()


class Timeline(TorchDispatchMode):
    """Records how many bytes of storages are alive in a step.

    Attributes:
        events: (None, bytes alive) after each allocation, (mark, bytes alive) at each mark.
        in_backward: Whether the forward is over; a group whose forward then runs again is not freed after it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[Mark | None, int]] = []
        self.in_backward = False
        self._alive = 0
        self._sizes: dict[int, int] = {}

    def mark(self, mark: Mark) -> None:
        self.events.append((mark, self._alive))

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Count the storages of these tensors with 0 bytes."""
        for tensor in tensors:
            self._follow(tensor, 0)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._follow(each, each.untyped_storage().nbytes())
        return result

    def _follow(self, tensor: Tensor, size: int) -> None:
        key = storage_key(tensor)
        if key is None or key in self._sizes:
            return
        self._sizes[key] = size
        weakref.finalize(tensor.untyped_storage(), self._free, key)
        self._alive += size
        if size:
            self.events.append((None, self._alive))

    def _free(self, key: int) -> None:
        self._alive -= self._sizes.pop(key)


class PostBackward(torch.autograd.Function):
    """The identity function, whose backward calls a function as soon as all gradients of its results exist."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.function()
        return None, *gradients


class GroupHooks:
    """Hooks that mark where FSDP2 would act on one group.

    Attributes:
        accumulates: Whether a backward leaves its gradients unsharded, for `reduce` after the last one.
        is_reduced: Whether the present backward is done with the group.
    """

    def __init__(
        self, group: Group, index: int, parameters: Mapping[str, Tensor], timeline: Timeline, accumulates: bool
    ) -> None:
        self.group, self.index, self.timeline = group, index, timeline
        self.parameters = {fqn: parameters[fqn] for fqn in group.parameters}
        self.policy = group.kwargs.get("mp_policy")
        self.to_run: set[nn.Module] = set()  # modules of the group that this forward has not left yet
        self.in_backward = False
        self.is_reduced = False
        self.accumulates = accumulates
        self._accumulated: tuple[str, ...] = ()

    def install(self) -> Iterator[Any]:
        for module in self.group.modules:
            yield module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            yield module.register_forward_hook(self.post_forward)

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = (args, kwargs)
        if self.policy is not None and self.policy.param_dtype is not None and self.policy.cast_forward_inputs:
            inputs = cast_floating(inputs, self.policy.param_dtype)
        # After the backward has reached the group, a forward recomputes activations, with unsharded parameters.
        if not self.in_backward and not self.to_run:
            self.to_run.update(self.group.modules)
            self.is_reduced = False
            self.timeline.mark(Mark(Point.PRE_FORWARD, self.index))
            inputs = self._hook_inputs(inputs)
        return inputs

    def _hook_inputs(self, inputs: Any) -> Any:
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.requires_grad]
        if not tensors:
            return inputs
        outputs = PostBackward.apply(self.post_backward, *tensors)  # type: ignore[no-untyped-call]
        hooked = dict(zip(map(id, tensors), outputs, strict=True))
        return tree_map_only(Tensor, lambda tensor: hooked.get(id(tensor), tensor), inputs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.in_backward:
            self.to_run.discard(module)
            if not self.to_run:
                if not self.timeline.in_backward:
                    self.timeline.mark(Mark(Point.POST_FORWARD, self.index))
                for each in tree_leaves(output):
                    if isinstance(each, Tensor) and each.requires_grad:
                        each.register_hook(self.pre_backward)
        if self.policy is not None and self.policy.output_dtype is not None:
            output = cast_floating(output, self.policy.output_dtype)
        return output

    def pre_backward(self, gradient: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.timeline.mark(Mark(Point.PRE_BACKWARD, self.index))

    def post_backward(self) -> None:
        self.in_backward, self.is_reduced = False, True
        if self.accumulates:
            self._accumulate()
        else:
            self.reduce()

    def reduce(self) -> None:
        """Reduce the gradients that there are."""
        reduced = tuple(dict.fromkeys((*self._accumulated, *self._with_gradient())))
        self.timeline.mark(Mark(Point.POST_BACKWARD, self.index, reduced))
        for fqn in reduced:
            self.parameters[fqn].grad = None
        self.timeline.mark(Mark(Point.GRADIENTS_FREED, self.index, reduced))

    def _accumulate(self) -> None:
        """Cast gradients to the dtype of the reduction, one after the other; without a cast they stay as they are."""
        reduce_dtype = None if self.policy is None else self.policy.reduce_dtype
        cast = [fqn for fqn in self._with_gradient() if reduce_dtype not in (None, self.parameters[fqn].dtype)]
        if not cast:
            return
        self._accumulated = tuple(cast)
        for fqn in cast[:-1]:
            self.parameters[fqn].grad = None
        self.timeline.mark(Mark(Point.ACCUMULATED, self.index, self._accumulated))
        self.parameters[cast[-1]].grad = None

    def _with_gradient(self) -> list[str]:
        return [fqn for fqn, parameter in self.parameters.items() if parameter.grad is not None]


class Step(nn.Module):
    """Forwards and backwards in one call, so that the model has fake parameters in the backward, too."""

    def __init__(self, model: nn.Module, timeline: Timeline, groups: Sequence[GroupHooks], place: Place) -> None:
        super().__init__()
        self.model, self.timeline, self.place = model, timeline, place
        position = {module: index for index, module in enumerate(model.modules())}
        self.groups = sorted(groups, key=lambda each: position[each.group.modules[0]])

    def forward(self, batches: Sequence[Batch]) -> None:
        waiting, in_flight = deque(batches), deque[tuple[Tensor, Tensor | None, Any]]()
        rounds = range(self.place.in_flight, 2 * self.place.traced - self.place.in_flight)
        for number, is_forward in enumerate(self.place.order()):
            if number == rounds.start and rounds:
                self.timeline.mark(Mark(Point.ROUND))
            if is_forward:
                in_flight.append(self._forward(dict(waiting.popleft())))
            else:
                output, gradient, _kept = in_flight.popleft()
                self._backward(output, gradient)
                del output, gradient, _kept
            if number == rounds.stop - 1 and rounds:
                self.timeline.mark(Mark(Point.ROUND))
        for group in self.groups if self.place.stages > 1 else ():
            group.reduce()

    def _forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None, Any]:
        """What the backward begins with, its gradient, and what is kept until it is over."""
        gradient = batch.pop("output_gradient", None)
        self.timeline.in_backward = False
        output = self.model(**batch)
        kept = output if self.place.stages > 1 else None
        output = _loss(output) if self.place.is_last else output
        self.timeline.mark(Mark(Point.FORWARD_END))
        return output, gradient, kept

    def _backward(self, output: Tensor, gradient: Tensor | None) -> None:
        self.timeline.in_backward = True
        for group in self.groups:
            group.is_reduced = False
        output.backward(gradient)
        for group in self.groups:
            if not group.is_reduced:  # no input of the group needed a gradient
                group.post_backward()


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations of one step.

    Attributes:
        events: The events of `Timeline`, without parameters, buffers and inputs.
        input_bytes: Bytes of a batch, what a stage receives included.
        received_bytes: Bytes of one microbatch that a stage receives from others.
        input_gradient_bytes: Bytes of the gradients of one microbatch's inputs.
    """

    events: list[tuple[Mark | None, int]]
    input_bytes: int
    received_bytes: int = 0
    input_gradient_bytes: int = 0


def trace_step(plan: Plan, batch: Batch, place: Place = WHOLE) -> Trace:
    """Run forward and backward of the plan's model on fake tensors, and leave the model as it is.

    Args:
        plan: The plan of a model on any device, meta included.
        batch: Keyword arguments of one forward; of tensors only shapes, strides and dtypes count. Those of a stage of a
            pipeline are `stage_batch`'s.
        place: Of the stage that the model is.
    Raises:
        EstimateError: the model returns no loss.
    """
    model, timeline = plan.root, Timeline()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_collector_paused())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        parameters = _fake_parameters(plan)
        buffers = {fqn: _fake(buffer) for fqn, buffer in model.named_buffers()}
        batches = [tree_map_only(Tensor, _fake, batch) for _ in range(place.traced)]
        inputs = [each for each in tree_leaves(batches) if isinstance(each, Tensor)]
        received = [each for each in inputs if place.stages > 1 and each.is_floating_point()]
        with_gradient = [each["inputs_embeds"].requires_grad_() for each in batches if not place.is_first]
        timeline.leave_out([*parameters.values(), *buffers.values(), *inputs])
        groups = [
            GroupHooks(group, i, parameters, timeline, place.stages > 1) for i, group in enumerate(plan.groups)
        ]
        for group in groups:
            for handle in group.install():
                stack.callback(handle.remove)
        stack.enter_context(timeline)
        tensors = {f"model.{fqn}": tensor for fqn, tensor in {**parameters, **buffers}.items()}
        functional_call(Step(model, timeline, groups, place), tensors, (batches,))
    sizes = (sum(each.nbytes for each in tensors) // place.traced for tensors in (inputs, received, with_gradient))
    return Trace(timeline.events, *sizes)


def _fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=DEVICE)


def _fake_parameters(plan: Plan) -> dict[str, Tensor]:
    dtypes: dict[str, torch.dtype | None] = {}
    for group in plan.groups:
        policy = group.kwargs.get("mp_policy")
        dtypes.update(dict.fromkeys(group.parameters, None if policy is None else policy.param_dtype))
    return {
        fqn: _fake(parameter, dtypes.get(fqn)).requires_grad_(parameter.requires_grad)
        for fqn, parameter in plan.root.named_parameters()
    }


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise EstimateError(
            f"expected a model that returns a loss, or an output with one, got {type(output).__name__}; wrap the model "
            "in a module that computes the loss"
        )
    return loss


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would free storages at points that differ from trace to trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
