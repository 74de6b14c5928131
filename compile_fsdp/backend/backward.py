"""Compile a backward that compiled autograd has captured, as one graph."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.inner import TracedGraph, compile_traced
from compile_fsdp.backend.lifetimes import weak_callable
from compile_fsdp.backend.prefill import unshard_inputs
from compile_fsdp.backend.progress import Phase
from compile_fsdp.errors import UnsupportedFeatureError
from compile_fsdp.options import Options
from compile_fsdp.passes import LegalizeReport, legalize_windows, pipelines
from compile_fsdp.passes.dynamo.drop_undefined_gradients import drop_undefined_gradients
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks
from compile_fsdp.passes.runner import Run
from compile_fsdp.replay.backward import BackwardRecord
from compile_fsdp.replay.recording import current, recording, see_guards
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.backward import expect_no_gradient
from compile_fsdp.runtime.group_calls import GROUP_CALLS
from compile_fsdp.runtime.pause import pause_collection
from compile_fsdp.torch_compat.autograd import prepare_compiled_autograd
from compile_fsdp.torch_compat.dynamo import (
    FailOnRecompileLimitHit,
    Unsupported,
    compile_for_many,
    fake_mode_of,
    mark_changing,
    release_real_tensors,
    without_side_effect_log,
)

_log = logging.getLogger("compile_fsdp")

# Begin of the warning that a backward is not compiled; the reason follows.
FALLS_BACK = "backward falls back to eager, op by op, with all its parameters unsharded: "


# Per thread: the object in which Dynamo keeps the hooks of the forward whose backward runs. It is not an argument,
# because compiled autograd calls compiled code only with tensors and autograd's hooks.
_hooks_of_forward = threading.local()


@contextmanager
def hooks_of_forward(state: Any) -> Iterator[None]:
    """Set the object whose hooks this thread's captured backwards call.

    They are the hooks that one forward has put on its intermediates.
    """
    outer, _hooks_of_forward.state = getattr(_hooks_of_forward, "state", None), state
    try:
        yield
    finally:
        _hooks_of_forward.state = outer


@dataclass(frozen=True, slots=True)
class _Ready:
    """A captured backward that can run.

    Attributes:
        function: The function that Dynamo traces.
        compiled: `function`, compiled on its first call.
        undefined: Positions in its inputs of the leaves that get no gradient from it.
    """

    function: FunctionType
    compiled: Callable[..., Any]
    undefined: Sequence[int]


class BackwardCompiler:
    """Compiles a captured backward; if that fails, runs it op by op.

    Compiled autograd's cache keeps its functions, and torch.compile keeps its backends, as long as the process lives.
    Both get functions with weak references to this object, because it belongs to the compiled forward graph, which
    Dynamo drops with the model.

    Attributes:
        record: Records the running backward if it is traced; None without a recording.
        has_gradient: By result of the forward whose backward runs: whether it has a gradient.
        sizes: Integer inputs of this forward: sizes that may change.
        options: The user's options, with the costs by which the forward was compiled.
        decision: How the step fits into its memory budget; None without a budget.
    """

    def __init__(
        self, options: Options, hooks: DeferredHooks | None, decision: BudgetDecision | None = None
    ) -> None:
        prepare_compiled_autograd()
        self.record: BackwardRecord | None = None
        self.has_gradient: Sequence[bool] = ()
        self.sizes: Sequence[int] = ()
        self.options = options
        self._hooks = hooks
        self.decision = decision
        self._runs: list[Callable[..., Any]] = []
        self._op_runs: set[Callable[..., Any]] = set()
        self._fake_modes: list[Any] = []  # of graphs compiled since the last run
        self._tracing: Phase | None = None  # from the first run until Dynamo has traced it

    def __call__(self, captured: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that compiled autograd calls for a captured graph."""
        has_gradient, changing = self.has_gradient, self.sizes
        ready: _Ready | None = None

        def run(inputs: list[Any], sizes: Any, scalars: Any, hooks: list[Any], *rest: Any) -> Any:
            nonlocal ready
            is_first = ready is None
            if ready is None:
                ready = self._prepare(captured, has_gradient, changing, inputs)
            expect_no_gradient([inputs[i] for i in ready.undefined])
            if self._hooks is not None:
                rest = (*rest, _hooks_of_forward.state)
            frame = None
            if is_first and self.record is not None:
                frame = self.record.begin(ready.function, (inputs, sizes, scalars, hooks, *rest), ready.undefined)
            with self._running(is_first), recording(frame):
                try:
                    return ready.compiled(inputs, sizes, scalars, hooks, *rest)
                except (Unsupported, FailOnRecompileLimitHit) as error:
                    if not inputs:
                        raise  # The compiled graph has run and failed, because it has emptied the list.
                    _log.warning("%s%s", FALLS_BACK, error)
                    unshard_inputs(inputs)
                    return captured(inputs, sizes, scalars, hooks, *rest)

        self._runs.append(run)
        # If AOTAutograd does not make every graph unique, a model may hit the cached graph of a deleted model.
        return weak_callable(run, otherwise=captured)

    def _prepare(
        self, captured: fx.GraphModule, has_gradient: Sequence[bool], sizes: Sequence[int], inputs: Sequence[Any]
    ) -> _Ready:
        """Rewrite a captured backward with its first inputs for Dynamo."""
        _mark_changing(inputs, sizes)
        hooks = None if self._hooks is None else self._hooks.names
        passes = pipelines.captured_backward(has_gradient=has_gradient, inputs=inputs, hooks=hooks)
        done = Run(captured.graph, passes)
        self._op_runs |= done.result(join_op_runs)
        captured.recompile()
        # Compile the function instead of the module, because Dynamo would also compile the module's exception handler,
        # which then fails with a different exception. Compile a copy, because the data that Dynamo keeps with code and
        # globals would live as long as the captured graph.
        function = FunctionType(captured.forward.__code__.replace(), dict(captured.forward.__globals__))
        method, backend = MethodType(function, captured), weak_callable(self._compile_traced)
        compiled = compile_for_many(method, backend, see_guards if self.record is not None else None)
        return _Ready(function, compiled, done.result(drop_undefined_gradients))

    @contextmanager
    def _running(self, is_first: bool) -> Iterator[None]:
        """Surround a run of a captured backward; the first run traces it."""
        if is_first:
            self._tracing = Phase("tracing the backward", self.options.progress)
        is_paused = is_first and pause_collection()
        try:
            with without_side_effect_log() if is_first else nullcontext():
                yield
        finally:
            if is_paused:
                gc.enable()
            self._end_tracing()
            while self._fake_modes:
                release_real_tensors(self._fake_modes.pop())

    def _end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.end()
            self._tracing = None

    def _compile_traced(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile Dynamo's trace of a captured backward, as a Dynamo backend."""
        self._end_tracing()
        if (fake_mode := fake_mode_of(gm)) is not None:
            self._fake_modes.append(fake_mode)
        inputs = GraphInputs(gm)
        calls = GROUP_CALLS | self._op_runs
        passes = pipelines.traced_backward(calls, names=inputs.name_before, fake_mode=fake_mode)
        _check_moved(Run(gm.graph, passes).result(legalize_windows))
        gm.recompile()
        graph = TracedGraph(gm, example_inputs, "backward", inputs, self.options, self.decision)
        unfilled = inputs.unfilled_positions(gm.graph)
        if self.record is not None:
            self.record.unfilled = unfilled
        compiled = compile_traced(graph, unfilled)
        if (frame := current()) is not None:
            frame.see_graph(compiled)
        return compiled


def _mark_changing(inputs: Sequence[Any], sizes: Sequence[int]) -> None:
    """Let Dynamo treat sizes as changing in the first trace.

    Dynamo would treat them as constants until they change.

    Args:
        inputs: Inputs of a captured backward: activations, gradients, parameters.
        sizes: Integer inputs of its forward. Products of up to three of them are marked too, because a batch of
            sequences may be flattened.
    """
    subsets = (itertools.combinations(sizes, count) for count in (1, 2, 3))
    changing = {math.prod(subset) for subset in itertools.chain.from_iterable(subsets)} - {0, 1}
    tensors = (each for each in inputs if isinstance(each, torch.Tensor) and owner_of(each) is None)
    for tensor in tensors if changing else ():
        for dim, size in enumerate(tensor.shape):
            if size in changing:
                mark_changing(tensor, dim)


def _check_moved(report: LegalizeReport) -> None:
    if report.unmoved:
        raise UnsupportedFeatureError(
            "expected every read of a parameter in the backward to fit between its gather and its free, got "
            f"{[f'{fqn}: {reason.value}' for fqn, reason in report.unmoved]}; leave out the hooks that change these "
            "parameters in the backward, or run this step eagerly"
        )
