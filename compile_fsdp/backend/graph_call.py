"""One run of a compiled forward graph, with its inner autograd graph.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from compile_fsdp.backend.backward_run import BackwardRun
from compile_fsdp.backend.compiled_forward import CallInputs, CompiledForward
from compile_fsdp.backend.measured_peak import begin_peak
from compile_fsdp.runtime import calls
from compile_fsdp.runtime.subclass_parameters import split_leaf
from compile_fsdp.torch_compat.autograd import (
    current_backward,
    get_versions,
    keeps_graph,
    preserve_version_counter,
    set_versions,
    will_run,
    without_saved_tensor_hooks,
)
from compile_fsdp.torch_compat.dispatch import is_wrapper_subclass

_log = logging.getLogger("compile_fsdp")


@dataclass(frozen=True, eq=False, slots=True)
class InnerGraph:
    """The inner autograd graph of a run.

    Attributes:
        inputs: The differentiable inputs, detached; for a tensor subclass, its leaf.
        outputs: The autograd edge of each output that needs a gradient, else None. An output itself would keep its
            memory, which the user may drop before the backward.
        versions: Version counters of the unsharded parameters when autograd saved them.
    """

    inputs: list[torch.Tensor]
    outputs: list[GradientEdge | None]
    versions: list[int]


class GraphCall:
    """One run of a forward graph.

    Attributes:
        forward_id: Identity of the model's forward that contains the run.
        thread: Identifier of the forward's thread.
        inner: The inner autograd graph; None before the forward, and once a backward frees it.
        node: Weak reference to the node of the outer autograd graph; None before the forward.
    """

    def __init__(self, forward: CompiledForward, inputs: CallInputs) -> None:
        self.forward = forward
        self.inputs = inputs
        outermost = calls.outermost()
        self.forward_id = object() if outermost is None else outermost.forward_id
        self.thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self.inner: InnerGraph | None = None
        self.node: weakref.ref[Any] | None = None
        self._backward_id: int | None = None  # number of the last backward through the run
        self._end_peak = begin_peak(forward, inputs.groups)
        for group, use in inputs.groups.items():
            group.forwards.add(self, is_whole=use.position in forward.parameters.whole)

    def run(self, args: list[Any]) -> Sequence[Any]:
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
                outputs = self.forward.run(*args)
            self.inner = InnerGraph(leaves, list(map(_edge, outputs)), get_versions(self.inputs.managed))
        return outputs

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
        run = BackwardRun(self.forward, self.inputs, self.forward_id, inner.outputs, grads, is_kept)
        return run, inner.inputs, inner.versions

    def _run_unchanged(self, versions: list[int], run: Callable[[], Any]) -> Any:
        """Run a backward with the saved version counters. See also [Note: Settings on the device's thread]."""
        with preserve_version_counter(self.inputs.managed):
            set_versions(self.inputs.managed, versions)
            return run() if threading.get_ident() == self.thread else self._context.run(run)


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if isinstance(output, torch.Tensor) and output.requires_grad else None


@cache
def _warn_of_saved_tensor_hooks() -> None:
    # A captured backward would call the hooks that unpack saved tensors, and could not be compiled.
    _log.warning(
        "a compiled graph keeps its saved tensors in memory, although a checkpoint around it, save_on_cpu() or other "
        "hooks on saved tensors would drop or move them: put the checkpoint inside the compiled module"
    )
