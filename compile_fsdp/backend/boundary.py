"""Enter compiled autograd from inside the user's ordinary backward.

[Note: The boundary]
The compiled forward graph sits inside an autograd function. Its outputs leave detached, so that the outer
autograd graph, which the user's `loss.backward()` runs, sees one node. The node's backward starts a second
backward, through the inner graph and under compiled autograd: FSDP2's backward hooks are traced together with
the gradient computation, and no global setting has to change.

[Note: Settings on the device's thread]
Settings of Dynamo, AOTAutograd and Inductor hold for the thread that has made them. On an accelerator the engine calls
the node on a thread of its own, which knows none of them, and the backward would be compiled with other settings than
the forward. So it runs in the context of its forward there. On the CPU it is called by `backward()` itself, and sees
what is set then.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp.backend.backward import BackwardCompiler, HooksOfForward
from compile_fsdp.backend.lifetimes import weak_callable
from compile_fsdp.errors import DoubleBackwardError, PartialBackwardError, SecondBackwardError
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks
from compile_fsdp.replay.backward import GraphReplay
from compile_fsdp.runtime import calls
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.backward import expect_no_gradient, start_backward
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.torch_compat.autograd import (
    accumulates_into,
    asks_for,
    compiled_autograd,
    get_versions,
    keeps_graph,
    set_versions,
    will_run,
)

GraphFn = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class ForwardGraph:
    """A compiled forward graph that reads unsharded parameters.

    Which parameter groups it works on is known by its inputs only: Dynamo runs one graph for several modules
    of the same class where it compiles their forward as a frame of its own.

    Attributes:
        run: The graph, compiled by the inner backend.
        managed: Positions of the graph inputs that are unsharded parameters.
        read: Positions in `managed` that something is computed with; of these parameters alone a gradient may come.
        whole: Positions in `managed` of parameters whose module runs in this graph from its inputs to its outputs.
        pre_backward_elsewhere: Positions in `managed` of parameters whose pre-backward hook is in another graph, behind
            a graph break.
        left_unsharded: Positions in `managed` of parameters that the graph leaves unsharded for its backward.
        backward_prefetch: When the backward gathers the groups that it needs next.
        hooks: Which of its inputs holds the hooks on its intermediates, if it has any; `run` does not take that one.
        compile_backward: Compiles the graph that compiled autograd captures.
        replay: Its backward, as far as it can run without being captured.
    """

    run: GraphFn
    managed: tuple[int, ...]
    read: frozenset[int]
    whole: frozenset[int]
    pre_backward_elsewhere: frozenset[int]
    left_unsharded: frozenset[int]
    backward_prefetch: BackwardPrefetch | None
    hooks: DeferredHooks | None
    compile_backward: BackwardCompiler
    replay: GraphReplay

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        args, hooks_state = (list(inputs), None) if self.hooks is None else self.hooks.split(inputs)
        if not torch.is_grad_enabled():
            return self._run_plain(args)
        groups: dict[TraceableGroup, _Use] = {}
        for position in self.managed:
            if (group := owner_of(args[position])) is not None:
                use = groups.setdefault(group, _Use(position, []))
                if position in self.read:
                    use.read.append(args[position])
        call = GraphCall(self, args, groups, hooks_state)
        sharded = [each.fsdp_param.sharded_param for group in groups for each in group.params]
        trainable = [parameter for parameter in sharded if parameter.requires_grad]
        if not trainable and not call.differentiable:
            return self._run_plain(args)
        differentiable = [args[i] for i in call.differentiable]
        # A tensor's own hooks would be called with the gradient that the boundary does not have.
        anchors = [p for p in trainable if not (p._backward_hooks or p._post_accumulate_grad_hooks)]
        leaf = torch.empty(0, requires_grad=True)
        return tuple(_Boundary.apply(call, *differentiable, leaf, *anchors))  # type: ignore[no-untyped-call]

    def _run_plain(self, args: list[Any]) -> Sequence[Any]:
        with _unchanged([args[i] for i in self.managed]):
            return self.run(*args)


class _Use(NamedTuple):
    """What a graph has to do with one parameter group: the position of one of its parameters, and those it reads."""

    position: int
    read: list[torch.Tensor]


class GraphCall:
    """One run of a forward graph, and its inner autograd graph until a backward has used that.

    Attributes:
        graph: The forward graph.
        args: Its inputs, until it has run.
        groups: The parameter groups that it works on.
        forward_id: Which forward of the model the run is a part of.
        hooks_state: The object that gets the hooks on the graph's intermediates; None if there are none.
        differentiable: Positions of the inputs that need a gradient and are no parameters.
        managed: The inputs that are unsharded parameters.
        versions: Their version counters when autograd saved them.
        inner_inputs: The differentiable inputs, detached.
        inner_outputs: The outputs of the inner autograd graph; None once a backward has used it.
        node: The node of the outer autograd graph.
        thread: The thread that the forward has run on.
        context: What was set there then. See [Note: Settings on the device's thread].
    """

    def __init__(
        self, graph: ForwardGraph, args: list[Any], groups: dict[TraceableGroup, _Use], hooks_state: Any
    ) -> None:
        self.graph = graph
        self.args = args
        self.groups = groups
        outermost = calls.outermost()
        self.forward_id = object() if outermost is None else outermost.forward_id
        self.hooks_state = hooks_state
        managed = set(graph.managed)
        self.differentiable = [
            i
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg.requires_grad and i not in managed
        ]
        self.managed = [args[i] for i in graph.managed]
        self.versions: list[int] = []
        self.inner_inputs: list[torch.Tensor] = []
        self.inner_outputs: Sequence[Any] | None = None
        self.node: weakref.ref[Any] | None = None
        self.thread = threading.get_ident()
        self.context = contextvars.copy_context()
        for group, use in groups.items():
            group.forwards.add(self, is_whole=use.position in graph.whole)

    def forward(self) -> tuple[Any, ...]:
        args, self.args = self.args, []
        for i in self.differentiable:
            args[i] = args[i].detach().requires_grad_()
            self.inner_inputs.append(args[i])
        with _unchanged(self.managed):
            with torch.enable_grad():
                self.inner_outputs = self.graph.run(*args)
            self.versions = get_versions(self.managed)
        return tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in self.inner_outputs)

    def check(self, leaf: torch.Tensor, edges: Sequence[Any]) -> list[int] | None:
        """Refuse what a compiled backward cannot do, before anything is computed.

        Args:
            leaf: One that a whole backward accumulates into.
            edges: The autograd nodes that get what the graph's node returns: those of the differentiable inputs, of
                `leaf`, and of the sharded parameters.
        Returns:
            None for a whole backward. Else the positions of the differentiable inputs whose gradients alone are wanted.
        """
        if self.inner_outputs is None:
            raise SecondBackwardError(
                "expected one backward for each forward, got a second one through the same compiled graph; "
                "run the forward again, or add the losses up and call backward() once"
            )
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "expected backward() without create_graph=True: the compiled backward of a sharded model "
                "cannot be differentiated again; run this step eagerly"
            )
        if accumulates_into(leaf):
            return None
        inputs, parameters = edges[: len(self.differentiable)], edges[len(self.differentiable) + 1 :]
        if any(map(asks_for, parameters)):
            raise PartialBackwardError(
                "expected loss.backward(), or gradients by the model's inputs alone, got torch.autograd.grad() or "
                "backward(inputs=...) by sharded parameters: their gradients end in their .grad; call loss.backward() "
                "and read them"
            )
        return [i for i, node in enumerate(inputs) if asks_for(node)]

    def backward_to_inputs(
        self, grads: Sequence[torch.Tensor | None], wanted: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """Gradients by some of the differentiable inputs, and by nothing else."""
        assert self.inner_outputs is not None
        kept = (self.inner_inputs, self.inner_outputs) if keeps_graph() else None
        inputs = [self.inner_inputs[i] for i in wanted]
        outputs, given = self._pair_outputs(grads)
        self.inner_inputs, self.inner_outputs = kept or ([], None)
        found: list[torch.Tensor | None] = [None] * len(self.differentiable)

        def run() -> None:
            gradients = torch.autograd.grad(outputs, inputs, given, retain_graph=kept is not None, allow_unused=True)
            for i, gradient in zip(wanted, gradients, strict=True):
                found[i] = gradient

        self._run_unchanged(partial(self._run_to_inputs, outputs, run))
        return found

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """All gradients; those of the differentiable inputs are returned."""
        outputs, given = self._pair_outputs(grads)
        inputs, self.inner_outputs, self.inner_inputs = self.inner_inputs, None, []
        self._run_unchanged(partial(self._run_whole, outputs, given))
        return [tensor.grad for tensor in inputs]

    def _pair_outputs(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs that have gradients, and these."""
        assert self.inner_outputs is not None
        has_gradient = [isinstance(out, torch.Tensor) and out.requires_grad for out in self.inner_outputs]
        self.graph.compile_backward.has_gradient = has_gradient
        every = zip(self.inner_outputs, grads, has_gradient, strict=True)
        pairs = [(out, grad) for out, grad, has in every if grad is not None and has]
        return [out for out, _ in pairs], [grad for _, grad in pairs]

    def _run_unchanged(self, run: Callable[[], None]) -> None:
        """Run a backward, as autograd has saved the parameters and where the forward's settings hold."""
        with _unchanged(self.managed):
            set_versions(self.managed, self.versions)
            if threading.get_ident() == self.thread:
                run()
            else:
                self.context.run(run)

    def _run_whole(self, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        with self._around_graph():
            again = self.graph.replay.backward
            if again is None or not again.run(self, outputs, grads, self.hooks_state):
                self._run_noted(outputs, grads)

    def _run_to_inputs(self, outputs: list[torch.Tensor], run: Callable[[], None]) -> None:
        with self._around_graph():
            expect_no_gradient(self.managed)
            self._run_captured(outputs, run)

    @contextlib.contextmanager
    def _around_graph(self) -> Iterator[None]:
        """What the groups do before and after the graph of a backward."""
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
            self._run_captured(outputs, lambda: torch.autograd.backward(outputs, grads))
        finally:
            compiler.record = None
        if recorder is not None:
            recorder.end_backward(self)

    def _run_captured(self, outputs: list[torch.Tensor], run: Callable[[], None]) -> None:
        carried = None
        if self.graph.hooks is not None and outputs:
            carried = outputs[0].register_hook(HooksOfForward(self.hooks_state))
        compile_captured = weak_callable(self.graph.compile_backward.__call__)
        try:
            with _without_nan_check(), compiled_autograd(compile_captured):
                run()
        finally:
            if carried is not None:
                carried.remove()

    def is_to_come(self) -> bool:
        """Whether the backward that runs now goes through this call, and has not yet."""
        return self.inner_outputs is not None and self.node is not None and will_run(self.node())

    def _begin(self) -> None:
        start_backward(next(iter(self.groups)).state)
        for group, (position, read) in self.groups.items():
            group.backward_prefetch = self.graph.backward_prefetch
            group.backward.enter_graph(group, read, None if position in self.graph.whole else self.forward_id)
            if position in self.graph.pre_backward_elsewhere:
                group.unshard_now()
            elif position in self.graph.left_unsharded:
                group.resume_unsharded()


@contextlib.contextmanager
def _unchanged(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keeps version counters: autograd would take a fill with the same values for a change of what it has saved.

    As eager FSDP2 does around its own fills. What has saved them may be eager code between graphs.
    """
    versions = get_versions(parameters)
    try:
        yield
    finally:
        set_versions(parameters, versions)


def _without_nan_check() -> contextlib.AbstractContextManager[None]:
    """Keeps anomaly mode from looking for gradients that only the sharded parameters will have."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


class _Boundary(torch.autograd.Function):
    """See [Note: The boundary]."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, *tensors: torch.Tensor) -> tuple[Any, ...]:
        # `tensors`: the differentiable inputs, a leaf that tells what kind of backward runs, and the sharded
        # parameters. These get no gradient from here; they make torch.autograd.grad() of a parameter reach
        # `backward`, which refuses it.
        ctx.set_materialize_grads(False)
        ctx.call = call
        call.node = weakref.ref(ctx)
        ctx.leaf = tensors[len(call.differentiable)]
        outputs = call.forward()
        assert call.inner_outputs is not None
        pairs = zip(outputs, call.inner_outputs, strict=True)
        plain = [out for out, inner in pairs if isinstance(out, torch.Tensor) and not inner.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.call.check(ctx.leaf, [node for node, _ in ctx.next_functions])
        input_grads = ctx.call.backward(grads) if wanted is None else ctx.call.backward_to_inputs(grads, wanted)
        without_grad = len(ctx.needs_input_grad) - 1 - len(input_grads)
        return (None, *input_grads, *(None,) * without_grad)
