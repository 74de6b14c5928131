"""One backward through the inner autograd graph of a compiled forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from compile_fsdp.backend.captured_backward import CapturedBackward, weak_method
from compile_fsdp.backend.compiled_forward import CallInputs, CompiledForward
from compile_fsdp.backend.step import BackwardObserver
from compile_fsdp.backend.this_run import Run, running
from compile_fsdp.runtime.backward import deliver, enter_graph, expect_no_gradient, leave_graph, start_backward
from compile_fsdp.runtime.run_compiler import run_compiler
from compile_fsdp.torch_compat.autograd import compiled_autograd, kept_hooks
from compile_fsdp.torch_compat.global_state import without_autocast


class BackwardRun:
    """One backward through a run of a forward graph.

    `grads` has a gradient or None for each of the run's `outputs`, given as autograd edges. `is_kept` tells whether the
    user keeps the autograd graph for a further backward.
    """

    def __init__(
        self,
        forward: CompiledForward,
        inputs: CallInputs,
        forward_id: object,
        outputs: Sequence[GradientEdge | None],
        grads: Sequence[torch.Tensor | None],
        is_kept: bool,
    ) -> None:
        self.forward = forward
        self.inputs = inputs
        self.forward_id = forward_id
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
                if (observer := self.forward.step.record.observer) is not None:
                    observer.begin_backward(self.inputs.managed, self.outputs, self.grads)
                self._run_captured(run, observer)
                if observer is not None:
                    observer.end_backward()

    def _run_known(self) -> bool:
        known, inputs = self.forward.step.record.known, self.inputs
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
            cut_forward = None if position in parameters.whole else self.forward_id
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
        step.record.compiled.append(backward)
        # If AOTAutograd does not make every graph unique, a model may hit the cached graph of a deleted model.
        return weak_method(backward.run, otherwise=captured)


def _without_nan_check() -> AbstractContextManager[None]:
    """Turn off anomaly mode's check for NaN, because only the sharded parameters will have the gradients it checks."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)
