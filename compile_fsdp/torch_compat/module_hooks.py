"""Full backward hooks of modules, as Dynamo puts them into a forward graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from compile_fsdp.torch_compat.declarations import Late

_trace_wrapped = Late("torch._dynamo._trace_wrapped_higher_order_op.trace_wrapped")
_call_module_hooks = Late("torch._dynamo.external_utils.call_module_hooks_from_backward_state")


def makes_module_hooks(node: torch.fx.Node) -> bool:
    """Whether a node makes the object that puts a module's full backward hooks on its inputs and outputs. (2.13.0)"""
    return getattr(node.target, "__name__", "") == "_in_graph_bw_hooks"


def call_with_output_gradients(make: Callable[[Any], Any], input_count: int) -> Callable[[Any], Any]:
    """Wrap a function that makes such an object: its hooks are called like pre-hooks, behind all pre-hooks. (2.13.0)

    `input_count`: number of the module's inputs, none of which has a gradient.
    """

    def make_hooks(state: Any) -> Any:
        hooks = make(state)
        (called,) = hooks.user_hooks
        facts = {name: value for name, value in called.keywords.items() if name != "fn"}
        call = partial(_trace_wrapped.value, fn=_call_hooks, input_count=input_count, **facts)
        hooks.user_hooks, hooks.user_pre_hooks = (), (*hooks.user_pre_hooks, call)
        return hooks

    return make_hooks


def _call_hooks(module: Any, output_gradients: Any, *, input_count: int, **facts: Any) -> Any:
    _call_module_hooks.value(module, (None,) * input_count, output_gradients, **facts)
    return output_gradients
