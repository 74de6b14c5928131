"""One run of a compiled forward graph, and its backward.

[Note: Settings on the device's thread]
Settings of Dynamo, AOTAutograd and Inductor hold for the thread that sets them. On an accelerator, the autograd engine
calls the node on a device thread without these settings, and would compile the backward with different settings than
the forward. So the backward runs there in the context of its forward. On the CPU, `backward()` itself calls the node,
and the settings at that time hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from compile_fsdp.backend.backward import hooks_of_forward
from compile_fsdp.backend.lifetimes import weak_callable
from compile_fsdp.errors import DoubleBackwardError, PartialBackwardError, SecondBackwardError, UnsupportedFeatureError
from compile_fsdp.runtime import calls
from compile_fsdp.runtime.backward import expect_no_gradient, start_backward
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.subclass_parameters import split_leaf
from compile_fsdp.torch_compat.autograd import (
    accumulates_into,
    asks_for,
    compiled_autograd,
    current_backward,
    get_versions,
    keeps_graph,
    kept_hooks,
    set_versions,
    will_run,
    without_saved_tensor_hooks,
)
from compile_fsdp.torch_compat.dispatch import is_wrapper_subclass
from compile_fsdp.torch_compat.distributed import split_backward_code, stage_forward_code

if TYPE_CHECKING:
    from compile_fsdp.backend.boundary import ForwardGraph

_log = logging.getLogger("compile_fsdp")


class GroupUse(NamedTuple):
    """A graph's use of one parameter group.

    Attributes:
        position: Position of one of the group's parameters in the graph's inputs.
        read: Parameters of the group that the graph computes with.
    """

    position: int
    read: list[torch.Tensor]


class _Place:
    """Thread and context of a forward. See [Note: Settings on the device's thread].

    Attributes:
        thread: Identifier of the thread.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._context = contextvars.copy_context()

    def run(self, function: Callable[[], None]) -> None:
        """Call a function, on a different thread in the forward's context."""
        if threading.get_ident() == self.thread:
            function()
        else:
            self._context.run(function)


class GraphCall:
    """One run of a forward graph, with its inner autograd graph.

    Attributes:
        graph: The forward graph.
        args: Its inputs; empty once it runs.
        groups: The parameter groups of its inputs.
        forward_id: Identity of the model's forward that contains the run.
        hooks_state: The object that gets the hooks on the graph's intermediates; None without hooks.
        sizes: Integer inputs: sizes that may change.
        differentiable: Positions of the inputs that need a gradient and are no unsharded parameters.
        leaves: The unsharded parameters that need a gradient, if the graph is a pipeline stage's whole forward, because
            a schedule may look for them behind the graph's node. Otherwise empty, because autograd would hold back
            gradients of these parameters from eager code until the graph's backward is over.
        managed: The inputs that are unsharded parameters.
        versions: Version counters of `managed` when autograd saved them.
        inner_inputs: The differentiable inputs, detached; for a tensor subclass, its leaf.
        inner_outputs: Outputs of the inner autograd graph; None before the forward, and once a backward frees it.
        backward_id: Number of the last backward through the run; None before.
        node: Weak reference to the node of the outer autograd graph; None before the forward.
        place: Thread and context of the forward.
    """

    def __init__(
        self, graph: ForwardGraph, args: list[Any], groups: dict[TraceableGroup, GroupUse], hooks_state: Any
    ) -> None:
        self.graph = graph
        self.args = args
        self.groups = groups
        outermost = calls.outermost()
        self.forward_id = object() if outermost is None else outermost.forward_id
        self.hooks_state = hooks_state
        managed = set(graph.managed)
        self.sizes = [arg for arg in args if type(arg) is int]
        self.differentiable = [
            i
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg.requires_grad and i not in managed
        ]
        is_all = graph.whole_of is not None and outermost is not None and graph.whole_of() is outermost.module
        is_stage = is_all and _runs_below(stage_forward_code(), threading.get_ident())
        self.leaves = [args[i] for i in graph.managed if is_stage and args[i].requires_grad]
        self.managed = [args[i] for i in graph.managed]
        self.versions: list[int] = []
        self.inner_inputs: list[torch.Tensor] = []
        self.inner_outputs: Sequence[Any] | None = None
        self.backward_id: int | None = None
        self.node: weakref.ref[Any] | None = None
        self.place = _Place()
        for group, use in groups.items():
            group.forwards.add(self, is_whole=use.position in graph.whole)

    def forward(self) -> tuple[Any, ...]:
        args, self.args = self.args, []
        for i in self.differentiable:
            if is_wrapper_subclass(args[i]) and not isinstance(args[i], DTensor):
                leaf, args[i] = split_leaf(args[i])
            else:
                leaf = args[i] = args[i].detach().requires_grad_()
            self.inner_inputs.append(leaf)
        with unchanged_versions(self.managed):
            with torch.enable_grad(), without_saved_tensor_hooks() as had_hooks:
                if had_hooks:
                    _warn_of_saved_tensor_hooks()
                self.inner_outputs = self.graph.run(*args)
            self.versions = get_versions(self.managed)
        return tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in self.inner_outputs)

    def check(self, leaf: torch.Tensor, edges: Sequence[Any]) -> list[int] | None:
        """Refuse a backward that cannot be compiled, before anything is computed.

        Args:
            leaf: A leaf that only a whole backward accumulates into.
            edges: Autograd nodes behind the graph's node: first of the differentiable inputs, then of `leaves`, of
                `leaf`, and of the sharded parameters.
        Returns:
            None for a whole backward. Otherwise the positions, in the differentiable inputs and `leaves`, whose
            gradients are asked for.
        """
        if self.inner_outputs is None:
            raise SecondBackwardError(
                "expected one backward for each forward, got a second one through the same compiled graph; call the "
                "first one with retain_graph=True, or add the losses up and call backward() once"
            )
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "expected backward() without create_graph=True: the compiled backward of a sharded model "
                "cannot be differentiated again; leave create_graph out, or train without sharding: eager FSDP2, too, "
                "frees the parameters that a second derivative reads"
            )
        if accumulates_into(leaf):
            return None
        own = len(self.differentiable) + len(self.leaves)
        if any(map(asks_for, edges[own + 1 :])):
            raise PartialBackwardError(
                "expected loss.backward(), or gradients by the model's inputs alone, got torch.autograd.grad() or "
                "backward(inputs=...) by sharded parameters: their gradients end in their .grad; call loss.backward() "
                "and read them"
            )
        if keeps_graph() and _runs_below(split_backward_code(), self.place.thread) and not self._can_split():
            raise UnsupportedFeatureError(
                "expected a pipeline stage compiled whole by its own compile(), without tensor parallelism, for a "
                "schedule that computes the gradients of inputs and of parameters apart, got one whose parameters such "
                "a schedule does not find; take another schedule, such as 1F1B"
            )
        return [i for i, node in enumerate(edges[:own]) if asks_for(node)]

    def _can_split(self) -> bool:
        """Return whether the node's inputs include the modules' trainable parameters themselves."""
        params = [each.fsdp_param for group in self.groups for each in group.params]
        return bool(self.leaves) and not any(each.is_dtensor for each in params)

    def backward_to(self, wanted: Sequence[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute and return gradients of some differentiable inputs and `leaves` only."""
        every = [*self.inner_inputs, *self.leaves]
        found: list[torch.Tensor | None] = [None] * len(every)
        inputs = [every[i] for i in wanted]
        outputs, given, is_kept = self._take_outputs(grads)

        def run() -> None:
            with kept_hooks(outputs) if is_kept else contextlib.nullcontext():
                gradients = torch.autograd.grad(outputs, inputs, given, retain_graph=is_kept, allow_unused=True)
            for i, gradient in zip(wanted, gradients, strict=True):
                found[i] = gradient

        self._run_unchanged(partial(self._run_part, run))
        return found

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute all gradients; return the gradients of the differentiable inputs."""
        inputs = self.inner_inputs
        outputs, given, is_kept = self._take_outputs(grads)
        self._run_unchanged(partial(self._run_whole, outputs, given, is_kept))
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None  # a later backward through a kept graph would add to it
        return found

    def _take_outputs(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
        """Return outputs with gradients, their gradients, and whether the graph is kept."""
        assert self.inner_outputs is not None
        has_gradient = [isinstance(out, torch.Tensor) and out.requires_grad for out in self.inner_outputs]
        self.graph.compile_backward.has_gradient = has_gradient
        self.graph.compile_backward.sizes = self.sizes
        every = zip(self.inner_outputs, grads, has_gradient, strict=True)
        pairs = [(out, grad) for out, grad, has in every if grad is not None and has]
        self.backward_id = current_backward()
        if not (is_kept := keeps_graph()):
            self.inner_inputs, self.inner_outputs = [], None
        return [out for out, _ in pairs], [grad for _, grad in pairs], is_kept

    def _run_unchanged(self, run: Callable[[], None]) -> None:
        """Run a backward with the saved version counters, in the forward's context."""
        with unchanged_versions(self.managed):
            set_versions(self.managed, self.versions)
            self.place.run(run)

    def _run_whole(self, outputs: list[torch.Tensor], grads: list[torch.Tensor], is_kept: bool) -> None:
        with self._around_graph():
            again = self.graph.replay.backward
            if is_kept:
                with kept_hooks(outputs):
                    self._run_captured(partial(torch.autograd.backward, outputs, grads, retain_graph=True))
            elif again is None or not again.run(self, outputs, grads, self.hooks_state):
                self._run_noted(outputs, grads)

    def _run_part(self, run: Callable[[], None]) -> None:
        with self._around_graph():
            expect_no_gradient(self.managed)
            self._run_captured(run)

    @contextlib.contextmanager
    def _around_graph(self) -> Iterator[None]:
        """Prepare the groups for a backward graph; deliver gradients after it."""
        self._begin()
        try:
            yield
            for group in self.groups:
                group.backward.deliver(group)
                group.modules.show_unsharded(group)
        except BaseException:
            for group in self.groups:
                group.end_backward()
            raise
        finally:
            for group in self.groups:
                group.backward.leave_graph(group)

    def _run_noted(self, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        compiler, recorder = self.graph.compile_backward, self.graph.replay.recorder
        if recorder is not None:
            compiler.record = recorder.begin_backward(self, outputs, grads)
        try:
            self._run_captured(partial(torch.autograd.backward, outputs, grads))
        finally:
            compiler.record = None
        if recorder is not None:
            recorder.end_backward(self)

    def _run_captured(self, run: Callable[[], None]) -> None:
        compile_captured = weak_callable(self.graph.compile_backward.__call__)
        with _without_nan_check(), hooks_of_forward(self.hooks_state), compiled_autograd(
            compile_captured, has_sizes=bool(self.sizes)
        ):
            run()

    def is_to_come(self) -> bool:
        """Return whether the running backward will still go through this call."""
        if self.inner_outputs is None or self.node is None or self.backward_id == current_backward():
            return False
        return will_run(self.node())

    def _begin(self) -> None:
        for state in {id(group.state._state_ctx): group.state for group in self.groups}.values():
            start_backward(state)
        for group, (position, read) in self.groups.items():
            group.backward_prefetch = self.graph.backward_prefetch
            if not group.is_unsharded:
                group.follow_trainable()  # as eager FSDP2 does when it gathers
            cut_forward = None if position in self.graph.whole else self.forward_id
            group.backward.enter_graph(group, read, cut_forward, may_meet_eager=not self.leaves)
            if position in self.graph.pre_backward_elsewhere:
                group.unshard_now()
            elif position in self.graph.left_unsharded:
                group.resume_unsharded()


def _runs_below(code: CodeType | None, thread: int) -> bool:
    """Return whether a function's frame is on a thread's stack.

    Args:
        code: Code of the function; None if nobody has imported it.
        thread: Identifier of the thread. A backward itself may run on a thread of the autograd engine.
    """
    frame = None if code is None else sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@cache
def _warn_of_saved_tensor_hooks() -> None:
    # A captured backward would call the hooks that unpack saved tensors, and could not be compiled.
    _log.warning(
        "a compiled graph keeps what it saves for its backward, though a checkpoint around it, save_on_cpu() or other "
        "hooks on saved tensors would not: put the checkpoint inside of what is compiled"
    )


@contextlib.contextmanager
def unchanged_versions(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore version counters on exit, as eager FSDP2 does around its fills.

    Autograd would take a fill with equal values for a change of a saved tensor. Eager code between graphs may have
    saved the parameters too.
    """
    versions = get_versions(parameters)
    try:
        yield
    finally:
        set_versions(parameters, versions)


def _without_nan_check() -> contextlib.AbstractContextManager[None]:
    """Turn off anomaly mode's check for NaN.

    Only the sharded parameters will have the gradients that it looks for.
    """
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)
