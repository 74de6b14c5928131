"""One run of a compiled forward graph, with its inner autograd graph, and the backwards through it.

[Note: Settings on the device's thread]
Settings of Dynamo, AOTAutograd and Inductor hold for the thread that sets them. On an accelerator, the autograd engine
calls the node on a device thread without these settings, and would compile the backward with different settings than
the forward. So the backward runs there in the context of its forward. On the CPU, `backward()` itself calls the node,
and the settings at that time hold.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from compile_fsdp.backend.captured_backward import CapturedBackward, weak_method
from compile_fsdp.backend.compiled_forward import CallInputs, CompiledForward
from compile_fsdp.backend.measured_peak import begin_peak
from compile_fsdp.backend.output_views import OutputViews
from compile_fsdp.backend.step import BackwardObserver
from compile_fsdp.backend.this_run import Run, running
from compile_fsdp.runtime import calls
from compile_fsdp.runtime.backward import deliver, enter_graph, expect_no_gradient, leave_graph, start_backward
from compile_fsdp.runtime.run_compiler import run_compiler
from compile_fsdp.runtime.subclass_parameters import split_leaf
from compile_fsdp.torch_compat.autograd import (
    compiled_autograd,
    current_backward,
    get_versions,
    keeps_graph,
    kept_hooks,
    preserve_version_counter,
    set_versions,
    will_run,
    without_saved_tensor_hooks,
)
from compile_fsdp.torch_compat.dispatch import is_wrapper_subclass
from compile_fsdp.torch_compat.global_state import without_autocast

_log = logging.getLogger("compile_fsdp")


@dataclass(frozen=True, eq=False, slots=True)
class InnerGraph:
    """The inner autograd graph of a run."""

    inputs: list[torch.Tensor]  # the differentiable inputs, detached; for a tensor subclass, its leaf
    # The autograd edge of each output that needs a gradient, else None. An output itself would keep its memory, which
    # the user may drop before the backward.
    outputs: list[GradientEdge | None]
    versions: list[int]  # version counters of the unsharded parameters when autograd saved them


class GraphCall:
    """One run of a forward graph."""

    def __init__(self, forward: CompiledForward, inputs: CallInputs) -> None:
        self.forward = forward
        self.inputs = inputs
        outermost = calls.outermost()
        self.forward_id = object() if outermost is None else outermost.forward_id  # of the model's forward
        self.thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self.inner: InnerGraph | None = None  # None before the forward, and once a backward frees it
        self._outputs: OutputViews | None = None  # between the forward and `take_outputs`
        self.node: weakref.ref[Any] | None = None  # to the node of the outer autograd graph; None before the forward
        self._backward_id: int | None = None  # number of the last backward through the run
        self._end_peak = begin_peak(forward, inputs.groups)
        for group, use in inputs.groups.items():
            group.forwards.add(self)
            group.is_cut |= use.position not in forward.parameters.whole

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph; return its outputs for `take_outputs`, which takes them, detached."""
        leaves: list[torch.Tensor] = []
        for i in self.inputs.differentiable:
            if is_wrapper_subclass(args[i]) and not isinstance(args[i], DTensor):
                leaf, args[i] = split_leaf(args[i])
            else:
                leaf = args[i] = args[i].detach().requires_grad_()
            leaves.append(leaf)
        # As eager FSDP2: autograd would take a fill with equal values for a change of a saved tensor.
        with preserve_version_counter(self.inputs.managed):
            with torch.enable_grad(), without_saved_tensor_hooks() as had_hooks:
                if had_hooks:
                    _warn_of_saved_tensor_hooks()
                self._outputs = OutputViews.of(self.forward.run(*args))
            outputs = self._outputs.tensors
            self.inner = InnerGraph(leaves, list(map(_edge, outputs)), get_versions(self.inputs.managed))
        return outputs

    def take_outputs(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the graph's outputs, with views of one tensor taken behind the boundary."""
        assert self._outputs is not None
        outputs, self._outputs = self._outputs, None
        return outputs.take(tensors)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute all gradients; return the gradients of the differentiable inputs."""
        run, inputs, versions = self._begin_backward(grads)
        self._run_unchanged(versions, run.run_whole)
        if self._end_peak is not None:
            self._end_peak()
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None  # a later backward through a kept graph would add to it
        return found

    def backward_to(self, wanted: Sequence[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute and return gradients of some differentiable inputs and `inputs.leaves` only."""
        run, inputs, versions = self._begin_backward(grads)
        every = [*inputs, *self.inputs.leaves]
        found: list[torch.Tensor | None] = [None] * len(every)
        gradients = self._run_unchanged(versions, partial(run.run_part, [every[i] for i in wanted]))
        for i, gradient in zip(wanted, gradients, strict=True):
            found[i] = gradient
        return found

    def is_to_come(self) -> bool:
        """Return whether the running backward will still go through this call."""
        if self.inner is None or self.node is None or self._backward_id == current_backward():
            return False
        return will_run(self.node())

    def _begin_backward(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[BackwardRun, list[torch.Tensor], list[int]]:
        """Return the backward, the inputs of the inner autograd graph, and the parameters' version counters.

        Unless the user keeps the graph, only the returned objects keep its tensors alive.
        """
        assert self.inner is not None
        inner, self._backward_id = self.inner, current_backward()
        if not (is_kept := keeps_graph()):
            self.inner = None
        return BackwardRun(self, inner.outputs, grads, is_kept), inner.inputs, inner.versions

    def _run_unchanged(self, versions: list[int], run: Callable[[], Any]) -> Any:
        """Run a backward with the saved version counters. See also [Note: Settings on the device's thread]."""
        with preserve_version_counter(self.inputs.managed):
            set_versions(self.inputs.managed, versions)
            return run() if threading.get_ident() == self.thread else self._context.run(run)


class BackwardRun:
    """One backward through the inner autograd graph of a call.

    `grads` has a gradient or None for each of the graph's `outputs`. `is_kept` tells whether the user keeps the graph
    for a further backward.
    """

    def __init__(
        self,
        call: GraphCall,
        outputs: Sequence[GradientEdge | None],
        grads: Sequence[torch.Tensor | None],
        is_kept: bool,
    ) -> None:
        self.call, self.forward, self.inputs = call, call.forward, call.inputs
        self.is_kept = is_kept
        self.has_gradient = [out is not None for out in outputs]
        every = zip(outputs, grads, strict=True)
        pairs = [(out, grad) for out, grad in every if out is not None and grad is not None]
        self.outputs = [out for out, _ in pairs]  # these get a gradient now
        self.grads = [grad for _, grad in pairs]

    def run_whole(self) -> None:
        run = partial(torch.autograd.backward, self.outputs, self.grads, retain_graph=self.is_kept)
        with self._around_graph():
            if not self.outputs:
                pass  # A later graph, or a function of the user, has no gradient for this graph's outputs.
            elif self.is_kept:
                self._run_captured(run)
            elif not self._run_known():
                if (observer := self.forward.step.observer) is not None:
                    observer.begin_backward(self.inputs.managed, self.outputs, self.grads)
                self._run_captured(run, observer)
                if observer is not None:
                    observer.end_backward()

    def _run_known(self) -> bool:
        known, inputs = self.forward.step.known, self.inputs
        return any(run(inputs.managed, self.outputs, self.grads, inputs.hooks) for run in known)

    def run_part(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Compute and return the gradients of some inputs of the inner autograd graph."""
        if not self.outputs:
            return [None] * len(inputs)
        run = partial(
            torch.autograd.grad, self.outputs, inputs, self.grads, retain_graph=self.is_kept, allow_unused=True
        )
        with self._around_graph():
            expect_no_gradient(self.inputs.managed)
            found: Sequence[torch.Tensor | None] = self._run_captured(run)
        return found

    @contextmanager
    def _around_graph(self) -> Iterator[None]:
        """Prepare the groups for a backward graph; deliver gradients after it."""
        self._prepare_groups()
        groups = self.inputs.groups
        try:
            with without_autocast():
                yield
            for group in groups:
                deliver(group)
        except BaseException:
            for group in groups:
                group.end_backward()
            raise
        finally:
            for group in groups:
                leave_graph(group)

    def _prepare_groups(self) -> None:
        parameters, groups = self.forward.parameters, self.inputs.groups
        for state in {id(group.state._state_ctx): group.state for group in groups}.values():
            start_backward(state)
        for group, (position, read) in groups.items():
            group.backward_prefetch = self.forward.step.options.backward_prefetch
            group.follow_trainable()  # as eager FSDP2 does when it gathers
            cut_forward = None if position in parameters.whole else self.call.forward_id
            enter_graph(group, read, cut_forward, may_meet_eager=not self.inputs.leaves)
            if position in parameters.pre_backward_elsewhere:
                group.unshard_now()
            elif position in parameters.left_unsharded:
                group.resume_unsharded()

    def _run_captured(self, run: Callable[[], Any], observer: BackwardObserver | None = None) -> Any:
        with (
            kept_hooks(self.outputs) if self.is_kept else nullcontext(),
            _without_nan_check(),
            running(Run(self.inputs.hooks, observer)),
            # Weak, because compiled autograd keeps the function as long as the process lives.
            compiled_autograd(weak_method(self._compile), has_sizes=bool(self.inputs.sizes)),
        ):
            return run_compiler(run)

    def _compile(self, captured: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that compiled autograd calls for a captured graph.

        Compiled autograd's cache keeps the function as long as the process lives. The function has a weak reference to
        the backward, because the backward belongs to the compiled forward graph, which Dynamo drops with the model.
        """
        step = self.forward.step
        backward = CapturedBackward(captured, step, self.has_gradient, self.inputs.sizes)
        step.compiled.append(backward)
        # If AOTAutograd does not make every graph unique, a model may hit the cached graph of a deleted model.
        return weak_method(backward.run, otherwise=captured)


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if isinstance(output, torch.Tensor) and output.requires_grad else None


@cache
def _warn_of_saved_tensor_hooks() -> None:
    # A captured backward would call the hooks that unpack saved tensors, and could not be compiled.
    _log.warning(
        "a compiled graph keeps its saved tensors in memory, although a checkpoint around it, save_on_cpu() or other "
        "hooks on saved tensors would drop or move them: put the checkpoint inside the compiled module"
    )


def _without_nan_check() -> AbstractContextManager[None]:
    """Turn off anomaly mode's check for NaN, because only the sharded parameters will have the gradients it checks."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)
