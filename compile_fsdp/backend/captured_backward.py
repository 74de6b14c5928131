"""Compile a backward that compiled autograd has captured, as one graph."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.inner import TracedGraph, compile_traced
from compile_fsdp.backend.prefill import unshard
from compile_fsdp.backend.progress import Phase
from compile_fsdp.backend.step import Step
from compile_fsdp.backend.this_run import running, see_guards, this_run
from compile_fsdp.errors import UnsupportedFeatureError
from compile_fsdp.passes import pipelines
from compile_fsdp.passes.analysis.untraced_code import UntracedCode
from compile_fsdp.passes.dynamo.drop_undefined_gradients import drop_undefined_gradients
from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs
from compile_fsdp.passes.dynamo.legalize_windows import legalize_windows
from compile_fsdp.passes.runner import run_passes
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.backward import expect_no_gradient
from compile_fsdp.runtime.tracing import GROUP_CALLS, keep_later_writes
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
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


def weak_method(method: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a caller of a bound method, for torch's permanent tables; it calls `otherwise` once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference() or otherwise
        assert target is not None
        return target(*args)

    return call


class CapturedBackward:
    """A captured backward. Its first run compiles it, or every run goes op by op if that fails.

    `has_gradient` tells which results of the forward have a gradient. `sizes` are the forward's integer inputs.
    """

    def __init__(
        self, captured: fx.GraphModule, step: Step, has_gradient: Sequence[bool], sizes: Sequence[int]
    ) -> None:
        self._captured, self._step, self._has_gradient, self._sizes = captured, step, has_gradient, sizes
        self._rewritten: tuple[FunctionType, Callable[..., Any], Sequence[int]] | None = None  # see `_rewrite`
        self._op_runs: Collection[Callable[..., Any]] = ()
        self._fake_modes: list[Any] = []  # of graphs compiled in the present run
        self._tracing: Phase  # of the present run; ends when Dynamo has traced the backward

    def run(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: list[Any], *rest: Any) -> Any:
        """Run the backward with compiled autograd's arguments; takes the tensors out of `inputs`."""
        facts, is_first = this_run(), self._rewritten is None
        if self._rewritten is None:
            self._rewritten = self._rewrite(inputs)
        function, compiled, undefined = self._rewritten
        expect_no_gradient([inputs[i] for i in undefined])
        if self._step.hooks is not None:
            rest = (*rest, facts.hooks)
        frame = None
        if facts.backward is not None:
            arguments = inputs, sizes, scalars, hooks, *rest
            frame = facts.backward.begin_frame(function, arguments, undefined)
        with (
            Phase("tracing the backward", is_first and self._step.options.progress) as self._tracing,
            without_side_effect_log() if is_first else nullcontext(),
            running(replace(facts, observer=frame)),
        ):
            try:
                return compiled(inputs, sizes, scalars, hooks, *rest)
            except (Unsupported, FailOnRecompileLimitHit) as error:
                if not inputs:
                    raise  # The compiled graph has run and failed, because it has emptied the list.
                _log.warning("%s%s", FALLS_BACK, error)
                # No pass has moved reads behind the hooks that gather. Hooks, or torch at the end, free each group.
                unshard(map(owner_of, inputs))
                return self._captured(inputs, sizes, scalars, hooks, *rest)
            finally:
                while self._fake_modes:
                    release_real_tensors(self._fake_modes.pop())

    def _rewrite(self, inputs: Sequence[Any]) -> tuple[FunctionType, Callable[..., Any], Sequence[int]]:
        """Rewrite the captured graph with its first inputs for Dynamo.

        Returns the function that Dynamo traces, the same compiled on its first call, and the positions in its inputs of
        the leaves that get no gradient from it.
        """
        captured, lifted = self._captured, self._step.hooks
        _mark_changing(inputs, self._sizes)
        hooks = None if lifted is None else lifted.names
        passes = pipelines.captured_backward(has_gradient=self._has_gradient, inputs=inputs, hooks=hooks)
        done = run_passes(captured.graph, passes)
        self._op_runs = done[join_op_runs]
        for name, body in captured.named_children():  # of conditions and loops
            if isinstance(body, fx.GraphModule):
                # A plain module, because Dynamo does not trace modules that compile their code on the first call.
                setattr(captured, name, fx.GraphModule(body, body.graph))
        for node in list(captured.graph.nodes):
            if isinstance(node.target, HigherOrderOperator):  # the hooks behind it write attributes
                with captured.graph.inserting_after(node):
                    captured.graph.call_function(keep_later_writes)
        captured.recompile()
        # Compile the function instead of the module, because Dynamo would also compile the module's exception handler,
        # which then fails with a different exception. Compile a copy, because the data that Dynamo keeps with code and
        # globals would live as long as the captured graph.
        function = FunctionType(captured.forward.__code__.replace(), dict(captured.forward.__globals__))
        # Weak, because torch.compile keeps its backends as long as the process lives.
        method, backend = MethodType(function, captured), weak_method(self._compile_traced)
        compiled = compile_for_many(method, backend, None if this_run().backward is None else see_guards)
        return function, compiled, done[drop_undefined_gradients]

    def _compile_traced(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile Dynamo's trace of the backward, as a Dynamo backend."""
        self._tracing.end()
        if (fake_mode := fake_mode_of(gm)) is not None:
            self._fake_modes.append(fake_mode)
        inputs = GraphInputs(gm)
        functions = {*GROUP_CALLS, *self._op_runs}
        passes = pipelines.traced_backward(functions, names=inputs.name_before, fake_mode=fake_mode)
        if unmoved := run_passes(gm.graph, passes)[legalize_windows].unmoved:
            raise UnsupportedFeatureError(
                "expected every read of a parameter in the backward to fit between its gather and its free, got "
                f"{[f'{fqn}: {reason.value}' for fqn, reason in unmoved]}; leave out the hooks that change these "
                "parameters in the backward, or run this step eagerly"
            )
        gm.recompile()
        unfilled = inputs.unfilled_positions(gm.graph)
        graph = TracedGraph(self._step, gm, example_inputs, "backward", inputs, UntracedCode())
        compiled = compile_traced(graph, unfilled)
        if (frame := this_run().observer) is not None:
            frame.see_graph(compiled)
        return compiled


def _mark_changing(inputs: Sequence[Any], sizes: Sequence[int]) -> None:
    """Let Dynamo treat a captured backward's sizes as changing in the first trace, instead of as constants at first.

    `sizes` are the integer inputs of its forward. Products of up to three of them are marked too, because a batch of
    sequences may be flattened.
    """
    subsets = (itertools.combinations(sizes, count) for count in (1, 2, 3))
    changing = {math.prod(subset) for subset in itertools.chain.from_iterable(subsets)} - {0, 1}
    tensors = (each for each in inputs if isinstance(each, torch.Tensor) and owner_of(each) is None)
    for tensor in tensors if changing else ():
        for dim, size in enumerate(tensor.shape):
            if size in changing:
                mark_changing(tensor, dim)
