"""Refuse backwards that cannot be compiled, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compile_fsdp.backend.compiled_forward import runs_below
from compile_fsdp.backend.graph_call import GraphCall
from compile_fsdp.errors import DoubleBackwardError, PartialBackwardError, SecondBackwardError, UnsupportedFeatureError
from compile_fsdp.torch_compat.autograd import accumulates_into, asks_for, keeps_graph
from compile_fsdp.torch_compat.distributed import split_backward_code


def check_backward(call: GraphCall, leaf: torch.Tensor, edges: Sequence[Any]) -> list[int] | None:
    """Refuse a backward that cannot be compiled.

    Args:
        leaf: A leaf that only a whole backward accumulates into.
        edges: Autograd nodes behind the graph's node: first of the differentiable inputs, then of `inputs.leaves`, of
            `leaf`, and of the sharded parameters.
    Returns:
        None for a whole backward. Otherwise the positions, in the differentiable inputs and `inputs.leaves`, whose
        gradients are asked for.
    """
    if call.inner is None:
        raise SecondBackwardError(
            "expected one backward for each forward, got a second one through the same compiled graph; call the "
            "first one with retain_graph=True, or add the losses up and call backward() once"
        )
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "expected backward() without create_graph=True: the compiled backward of a sharded model "
            "cannot be differentiated again; leave create_graph out, or train without sharding: eager FSDP2, too, "
            "frees the parameters that a second derivative reads"
        )
    if accumulates_into(leaf):
        return None
    own = len(call.inputs.differentiable) + len(call.inputs.leaves)
    if any(map(asks_for, edges[own + 1 :])):
        raise PartialBackwardError(
            "expected loss.backward(), or gradients with respect to the model's inputs only, got "
            "torch.autograd.grad() or backward(inputs=...) with respect to sharded parameters, whose gradients are "
            "only stored in .grad; call loss.backward() and read .grad"
        )
    if keeps_graph() and runs_below(split_backward_code(), call.thread) and not _can_split(call):
        raise UnsupportedFeatureError(
            "expected a pipeline stage compiled whole by its own compile(), without tensor parallelism, for a "
            "schedule that computes the gradients of inputs and of parameters separately, got a stage whose "
            "parameters such a schedule does not find; use a different schedule, such as 1F1B"
        )
    return [i for i, node in enumerate(edges[:own]) if asks_for(node)]


def _can_split(call: GraphCall) -> bool:
    """Return whether the node's inputs include the modules' trainable parameters themselves."""
    params = [each.fsdp_param for group in call.inputs.groups for each in group.params]
    return bool(call.inputs.leaves) and not any(each.is_dtensor for each in params)
