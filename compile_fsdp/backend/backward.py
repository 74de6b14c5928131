"""Compile what compiled autograd captures of a backward, as one graph."""

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

# How the warning begins that a backward is not compiled; its reason follows.
FALLS_BACK = "backward falls back to eager, op by op, with all its parameters unsharded: "


# By thread, the object that Dynamo has given the hooks of the forward whose backward runs. Compiled autograd calls what
# it has compiled with tensors and with hooks of autograd's own only.
_hooks_of_forward = threading.local()


@contextmanager
def hooks_of_forward(state: Any) -> Iterator[None]:
    """Within it, captured backwards of this thread call the hooks that one forward has put on its intermediates."""
    outer, _hooks_of_forward.state = getattr(_hooks_of_forward, "state", None), state
    try:
        yield
    finally:
        _hooks_of_forward.state = outer


@dataclass(frozen=True, slots=True)
class _Ready:
    """A captured backward that can run.

    Attributes:
        function: What Dynamo traces.
        compiled: The same, compiled when it is first called.
        undefined: Positions, among its inputs, of the leaves that get no gradient from it.
    """

    function: FunctionType
    compiled: Callable[..., Any]
    undefined: Sequence[int]


class BackwardCompiler:
    """Compiles a captured backward; where that fails, runs it op by op.

    Compiled autograd's cache keeps what it is given as long as the process lives, and so does torch.compile with
    a backend. Both get functions that only refer to this object: it belongs to the compiled forward graph, which Dynamo
    drops with the model.

    Attributes:
        record: Takes note of the backward that runs now, if it is traced; None if nobody does.
        has_gradient: By result of the forward, whether it has a gradient; of the forward whose backward runs now.
        sizes: That this forward takes as numbers, since they may change.
        options: The user's, with the costs that the forward was compiled by.
        decision: How the step is fitted into its memory budget; None without a budget.
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
        self._fake_modes: list[Any] = []  # of graphs that were compiled since the last run
        self._tracing: Phase | None = None  # from the first run until Dynamo has traced it

    def __call__(self, captured: fx.GraphModule) -> Callable[..., Any]:
        """What compiled autograd is to call in place of the graph that it has captured."""
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
                        raise  # The compiled graph has emptied the list: it has run, and failed.
                    _log.warning("%s%s", FALLS_BACK, error)
                    unshard_inputs(inputs)
                    return captured(inputs, sizes, scalars, hooks, *rest)

        self._runs.append(run)
        # Where AOTAutograd does not make every graph unique, a model may come upon the graph of one that is gone.
        return weak_callable(run, otherwise=captured)

    def _prepare(
        self, captured: fx.GraphModule, has_gradient: Sequence[bool], sizes: Sequence[int], inputs: Sequence[Any]
    ) -> _Ready:
        """Rewrite a captured backward, with the inputs of its first run, and let Dynamo trace what is left."""
        _mark_changing(inputs, sizes)
        hooks = None if self._hooks is None else self._hooks.names
        passes = pipelines.captured_backward(has_gradient=has_gradient, inputs=inputs, hooks=hooks)
        done = Run(captured.graph, passes)
        self._op_runs |= done.result(join_op_runs)
        captured.recompile()
        # Not the module itself: its handling of an exception would be compiled too, and fail with another one.
        # And a copy, since what Dynamo keeps with code and globals would live as long as the captured graph.
        function = FunctionType(captured.forward.__code__.replace(), dict(captured.forward.__globals__))
        method, backend = MethodType(function, captured), weak_callable(self._compile_traced)
        compiled = compile_for_many(method, backend, see_guards if self.record is not None else None)
        return _Ready(function, compiled, done.result(drop_undefined_gradients))

    @contextmanager
    def _running(self, is_first: bool) -> Iterator[None]:
        """Around a run of a captured backward, of which the first one traces it."""
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
        """The backend of Dynamo's trace of a captured backward."""
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
    """Let Dynamo take sizes for changing at once, where it would take them for constants until they have changed.

    Args:
        inputs: Of a captured backward: activations, gradients, parameters.
        sizes: Those that its forward takes as numbers. Others may be products of them: a batch of sequences, flattened.
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
