"""One backward through the inner autograd graph of a compiled forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from compile_fsdp.backend.call_inputs import CallInputs
from compile_fsdp.backend.captured_backward import BackwardCompiler
from compile_fsdp.backend.compiled_forward import CompiledForward
from compile_fsdp.backend.lifetimes import weak_callable
from compile_fsdp.backend.step import BackwardObserver
from compile_fsdp.backend.this_run import Run, running
from compile_fsdp.runtime.backward import deliver, enter_graph, expect_no_gradient, leave_graph, start_backward
from compile_fsdp.torch_compat.autograd import compiled_autograd, kept_hooks


@dataclass(frozen=True, eq=False, slots=True)
class BackwardRun:
    """One backward through a run of a forward graph.

    Attributes:
        forward: The forward graph.
        inputs: Inputs of its run.
        forward_id: Identity of the model's forward that contains the run.
        has_gradient: By output of the forward graph: whether it can have a gradient.
        outputs: The outputs that get a gradient now.
        grads: Their gradients.
        is_kept: Whether the user keeps the autograd graph for a further backward.
    """

    forward: CompiledForward
    inputs: CallInputs
    forward_id: object
    has_gradient: list[bool]
    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]
    is_kept: bool

    @classmethod
    def of(
        cls,
        forward: CompiledForward,
        inputs: CallInputs,
        forward_id: object,
        outputs: Sequence[Any],
        grads: Sequence[torch.Tensor | None],
        is_kept: bool,
    ) -> BackwardRun:
        """Select the outputs that get a gradient; `grads` has one gradient or None for each output."""
        has_gradient = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
        every = zip(outputs, grads, has_gradient, strict=True)
        pairs = [(out, grad) for out, grad, has in every if grad is not None and has]
        return cls(
            forward, inputs, forward_id, has_gradient, [out for out, _ in pairs], [grad for _, grad in pairs], is_kept
        )

    def run_whole(self) -> None:
        """Compute all gradients."""
        record = self.forward.step.record
        run = partial(torch.autograd.backward, self.outputs, self.grads, retain_graph=self.is_kept)
        with self._around_graph():
            if self.is_kept:
                with kept_hooks(self.outputs):
                    self._run_captured(run)
            elif record.known is None or not record.known.run(
                self.inputs.managed, self.outputs, self.grads, self.inputs.hooks
            ):
                self._run_observed(run, record.observer)

    def run_part(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Compute and return the gradients of some inputs of the inner autograd graph."""
        found: list[torch.Tensor | None] = []

        def run() -> None:
            with kept_hooks(self.outputs) if self.is_kept else nullcontext():
                found.extend(
                    torch.autograd.grad(
                        self.outputs, inputs, self.grads, retain_graph=self.is_kept, allow_unused=True
                    )
                )

        with self._around_graph():
            expect_no_gradient(self.inputs.managed)
            self._run_captured(run)
        return found

    @contextmanager
    def _around_graph(self) -> Iterator[None]:
        """Prepare the groups for a backward graph; deliver gradients after it."""
        self._prepare_groups()
        groups = self.inputs.groups
        try:
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
            if not group.is_unsharded:
                group.follow_trainable()  # as eager FSDP2 does when it gathers
            cut_forward = None if position in parameters.whole else self.forward_id
            enter_graph(group, read, cut_forward, may_meet_eager=not self.inputs.leaves)
            if position in parameters.pre_backward_elsewhere:
                group.unshard_now()
            elif position in parameters.left_unsharded:
                group.resume_unsharded()

    def _run_observed(self, run: Callable[[], None], observer: BackwardObserver | None) -> None:
        if observer is not None:
            observer.begin_backward(self.inputs.managed, self.outputs, self.grads)
        self._run_captured(run, observer)
        if observer is not None:
            observer.end_backward()

    def _run_captured(self, run: Callable[[], None], observer: BackwardObserver | None = None) -> None:
        compiler = BackwardCompiler(self.forward.step, self.has_gradient, self.inputs.sizes, observer)
        # Weak, because compiled autograd keeps the function as long as the process lives.
        compile_captured = weak_callable(compiler.compile)
        with (
            _without_nan_check(),
            running(Run(self.inputs.hooks)),
            compiled_autograd(compile_captured, has_sizes=bool(self.inputs.sizes)),
        ):
            run()


def _without_nan_check() -> AbstractContextManager[None]:
    """Turn off anomaly mode's check for NaN.

    Only the sharded parameters will have the gradients that it looks for.
    """
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)
