"""Enter compiled autograd from inside the user's ordinary backward.

[Note: The boundary]
The compiled forward graph runs inside an autograd function. Its outputs are detached, so the outer autograd graph,
which the user's `loss.backward()` runs, has one node for it. The node's backward starts a second backward through the
inner autograd graph, under compiled autograd. FSDP2's backward hooks are traced together with the gradient computation,
and no global setting changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp.backend.backward import BackwardCompiler
from compile_fsdp.backend.graph_call import GraphCall, GroupUse, unchanged_versions
from compile_fsdp.passes.dynamo.lift_tensor_hooks import DeferredHooks
from compile_fsdp.replay.backward import GraphReplay
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.group import TraceableGroup

GraphFn = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class ForwardGraph:
    """A compiled forward graph that reads unsharded parameters.

    Only its inputs tell its parameter groups, because Dynamo runs one graph for several modules of a class if it
    compiles their forward as a separate frame.

    Attributes:
        run: The graph, compiled by the inner backend.
        managed: Positions of the graph inputs that are unsharded parameters.
        parts: Positions in `managed` of parts of parameters that are tensor subclasses.
        read: Positions in `managed` of parameters that the graph computes with; only these may get a gradient.
        whole: Positions in `managed` of parameters whose module runs in this graph from its inputs to its outputs.
        whole_of: The called module if its whole forward is in the graph; else None.
        pre_backward_elsewhere: Positions in `managed` of parameters whose pre-backward hook is in a different graph,
            behind a graph break.
        left_unsharded: Positions in `managed` of parameters that the graph leaves unsharded for its backward.
        backward_prefetch: When the backward gathers the groups that it needs next.
        hooks: The hooks on its intermediates, and the position of the input that holds them; None without hooks. `run`
            takes the inputs that `hooks.split` returns.
        compile_backward: Compiles the graph that compiled autograd captures.
        replay: Its recorded backward, which can run without a capture.
    """

    run: GraphFn
    managed: tuple[int, ...]
    parts: tuple[int, ...]
    read: frozenset[int]
    whole: frozenset[int]
    whole_of: weakref.ref[nn.Module] | None
    pre_backward_elsewhere: frozenset[int]
    left_unsharded: frozenset[int]
    backward_prefetch: BackwardPrefetch | None
    hooks: DeferredHooks | None
    compile_backward: BackwardCompiler
    replay: GraphReplay

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        args, hooks_state = (list(inputs), None) if self.hooks is None else self.hooks.split(inputs)
        for owner in {owner_of(args[position]) for position in self.parts}:
            if owner is not None:
                owner.adopt_parts()
        if not torch.is_grad_enabled():
            return self._run_plain(args)
        groups: dict[TraceableGroup, GroupUse] = {}
        for position in self.managed:
            if (group := owner_of(args[position])) is not None:
                use = groups.setdefault(group, GroupUse(position, []))
                if position in self.read:
                    use.read.append(args[position])
        call = GraphCall(self, args, groups, hooks_state)
        sharded = [each.fsdp_param.sharded_param for group in groups for each in group.params]
        trainable = [parameter for parameter in sharded if parameter.requires_grad]
        if not trainable and not call.differentiable:
            return self._run_plain(args)
        differentiable = [args[i] for i in call.differentiable]
        # Leave out parameters with hooks, because autograd would call these, and the boundary has no gradient for them.
        anchors = [p for p in trainable if not (p._backward_hooks or p._post_accumulate_grad_hooks)]
        leaf = torch.empty(0, requires_grad=True)
        return tuple(_Boundary.apply(call, *differentiable, *call.leaves, leaf, *anchors))  # type: ignore[no-untyped-call]

    def _run_plain(self, args: list[Any]) -> Sequence[Any]:
        with unchanged_versions([args[i] for i in self.managed]):
            return self.run(*args)


class _Boundary(torch.autograd.Function):
    """See [Note: The boundary]."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, *tensors: torch.Tensor) -> tuple[Any, ...]:
        # `tensors`: the differentiable inputs; the unsharded parameters for which pipeline schedules ask gradients; a
        # leaf that tells a whole backward from a partial one; and the sharded parameters. The sharded parameters get no
        # gradient here. They make torch.autograd.grad() of a parameter reach `backward`, which refuses it.
        ctx.set_materialize_grads(False)
        ctx.call = call
        call.node = weakref.ref(ctx)
        ctx.leaf = tensors[len(call.differentiable) + len(call.leaves)]
        outputs = call.forward()
        assert call.inner_outputs is not None
        pairs = zip(outputs, call.inner_outputs, strict=True)
        plain = [out for out, inner in pairs if isinstance(out, torch.Tensor) and not inner.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.call.check(ctx.leaf, [node for node, _ in ctx.next_functions])
        input_grads = ctx.call.backward(grads) if wanted is None else ctx.call.backward_to(wanted, grads)
        without_grad = len(ctx.needs_input_grad) - 1 - len(input_grads)
        return (None, *input_grads, *(None,) * without_grad)
