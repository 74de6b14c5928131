"""Enter compiled autograd from inside the user's ordinary backward.

[Note: The boundary]
The compiled forward graph runs inside an autograd function. Its outputs are detached, so the outer autograd graph,
which the user's `loss.backward()` runs, has one node for it. The node's backward starts a second backward through the
inner autograd graph, under compiled autograd. FSDP2's backward hooks are traced together with the gradient computation,
and no global setting changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from compile_fsdp.backend.backward_checks import check_backward
from compile_fsdp.backend.compiled_forward import CallInputs, CompiledForward
from compile_fsdp.backend.graph_call import GraphCall
from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.torch_compat.autograd import prepare_compiled_autograd, preserve_version_counter


class ForwardGraph:
    """A compiled forward graph, whose backward runs under compiled autograd. See [Note: The boundary]."""

    def __init__(self, forward: CompiledForward) -> None:
        prepare_compiled_autograd()
        self.forward = forward

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        lifted, parameters = self.forward.step.hooks, self.forward.parameters
        args, hooks = (list(inputs), None) if lifted is None else lifted.split(inputs)
        for owner in {owner_of(args[position]) for position in parameters.parts}:
            if owner is not None:
                owner.adopt_parts()
        if not torch.is_grad_enabled():
            return self._run_plain(args)
        call_inputs = CallInputs.of(self.forward, args, hooks)
        call = GraphCall(self.forward, call_inputs)
        sharded = [each.fsdp_param.sharded_param for group in call_inputs.groups for each in group.params]
        trainable = [parameter for parameter in sharded if parameter.requires_grad]
        if not trainable and not call_inputs.differentiable:
            return self._run_plain(args)
        differentiable = [args[i] for i in call_inputs.differentiable]
        # Leave out parameters with hooks, because autograd would call these, and the boundary has no gradient for them.
        anchors = [p for p in trainable if not (p._backward_hooks or p._post_accumulate_grad_hooks)]
        leaf = torch.empty(0, requires_grad=True)
        tensors = *differentiable, *call_inputs.leaves, leaf, *anchors
        outputs = _Boundary.apply(call, args, *tensors)  # type: ignore[no-untyped-call]
        return call.take_outputs(outputs)

    def _run_plain(self, args: list[Any]) -> Sequence[Any]:
        # Eager code between graphs may have saved the parameters.
        with preserve_version_counter(tuple(args[i] for i in self.forward.parameters.managed)):
            return self.forward.run(*args)


class _Boundary(torch.autograd.Function):
    """See [Note: The boundary]."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, args: list[Any], *tensors: torch.Tensor) -> tuple[Any, ...]:
        # `tensors`: the differentiable inputs; the unsharded parameters for which pipeline schedules ask gradients; a
        # leaf that tells a whole backward from a partial one; and the sharded parameters. The sharded parameters get no
        # gradient here. They make torch.autograd.grad() of a parameter reach `backward`, which refuses it.
        ctx.set_materialize_grads(False)
        ctx.call = call
        call.node = weakref.ref(ctx)
        ctx.leaf = tensors[len(call.inputs.differentiable) + len(call.inputs.leaves)]
        inner = call.run(args)
        outputs = tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in inner)
        pairs = zip(outputs, inner, strict=True)
        plain = [out for out, inner in pairs if isinstance(out, torch.Tensor) and not inner.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = check_backward(ctx.call, ctx.leaf, [node for node, _ in ctx.next_functions])
        input_grads = ctx.call.backward(grads) if wanted is None else ctx.call.backward_to(wanted, grads)
        without_grad = len(ctx.needs_input_grad) - 2 - len(input_grads)
        return (None, None, *input_grads, *(None,) * without_grad)
