"""What a CUDA graph can replay: the device, the ops of a graph, and parameters that stay unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.backend.graph_inputs import GraphInputs
from compile_fsdp.backend.prefill import owners_of
from compile_fsdp.errors import UnknownOptionError, UnsupportedFeatureError
from compile_fsdp.ops import offload
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.partitioned.drop_random_states import is_random
from compile_fsdp.passes.report import Kept
from compile_fsdp.passes.text import list_names
from compile_fsdp.reports import GraphReport
from compile_fsdp.torch_compat.inductor import is_unsafe_in_graphs
from compile_fsdp.wrap.tree import ROOT

# Why a parameter is unsharded when a graph starts or returns. It can stay allocated.
_BETWEEN_GRAPHS = {Kept.OPEN_AT_START.value, Kept.OPEN_AT_RETURN.value}


def check_device(device: torch.device) -> None:
    """Refuse CUDA graphs on a device that has none."""
    if not hasattr(torch.get_device_module(device), "CUDAGraph"):
        raise UnknownOptionError(
            f"expected a GPU to capture CUDA graphs on, got {device}; leave out the mode or option that asks for them "
            '(reduce-overhead, max-autotune, triton.cudagraphs), or use mode="max-autotune-no-cudagraphs"'
        )


def check_capturable(graph: fx.Graph, what: str) -> None:
    """Raise UnsupportedFeatureError if a graph runs Python code or reads CPU tensors, which no CUDA graph can do."""
    if found := list(dict.fromkeys(filter(None, map(_find_fault, graph.nodes)))):
        raise UnsupportedFeatureError(
            f"expected a {what} that a CUDA graph can replay, got one with {' and '.join(found)}; leave these out, or "
            'compile without CUDA graphs, such as with mode="max-autotune-no-cudagraphs"'
        )


# Ops that run on the CPU, and the feature that uses each.
_HOST_OPS = {
    torch.ops.compile_fsdp.hand_over.default: "hooks on sharded parameters, such as an optimizer in the backward",
    offload: "activations that a memory_budget offloads",
    torch.ops.higher_order.cond: "torch.cond, which reads its condition on the CPU",
    torch.ops.higher_order.while_loop: "a while_loop, which reads its condition on the CPU",
    torch.ops.higher_order.run_and_save_rng_state: "dropout in a checkpoint",
    torch.ops.higher_order.run_with_rng_state: "dropout in a checkpoint",
}


def _find_fault(node: fx.Node) -> str | None:
    called = node.target, *node.args[:1]  # a functionalized op is the first argument of its node
    if (cause := next((cause for op, cause in _HOST_OPS.items() if op in called), None)) is not None:
        return cause
    if node.op == "placeholder":
        if node.users and _is_on_host(node, least_dims=0):
            return "tensors on the CPU among its inputs, such as offloaded parameters"
        return None
    if is_unsafe_in_graphs(node):
        return f"the op {node.target}"
    if node.op != "call_function":
        return None
    if _is_on_host(node, least_dims=0):
        if is_random(node) or not all(_is_on_host(each, least_dims=0) for each in node.all_input_nodes):
            return f"the op {node.target}, whose result is on the CPU"
    elif any(_is_on_host(each, least_dims=1) for each in node.all_input_nodes):
        return f"the op {node.target} on a tensor on the CPU"
    return None


def _is_on_host(node: fx.Node, least_dims: int) -> bool:
    tensor = find_fake_tensor(node)
    return tensor is not None and tensor.device.type == "cpu" and tensor.ndim >= least_dims


def allocate_kept(
    compiled: Callable[..., Any], inputs: GraphInputs, reports: Sequence[GraphReport]
) -> Callable[..., Any]:
    """Allocate the parameters that stay unsharded across a graph's start or return, before each run.

    Raises:
        UnsupportedFeatureError: a kept window has to be freed within the graph, or a forward reshards to a part of the
            ranks.
    """
    kept = [(fqn, reason) for report in reports for fqn, reason in report.kept]
    if freed := [f"{fqn}: {reason}" for fqn, reason in kept if reason not in _BETWEEN_GRAPHS]:
        raise UnsupportedFeatureError(
            f"expected a graph that gathers and frees each parameter, or leaves it unsharded, got {list_names(freed)}; "
            "compile without CUDA graphs, or change how the model reads these parameters"
        )
    smaller = [group for group in inputs.groups if group.constants.post_forward_group]
    if names := [group.fsdp_group._module_fqn or ROOT for group in smaller]:
        raise UnsupportedFeatureError(
            f"expected no module that reshards to a part of the ranks after its forward, got {list_names(names)}; set "
            "reshard_after_forward to True or False, or compile without CUDA graphs"
        )
    positions = inputs.positions_of({fqn for fqn, _ in kept})

    def run(*args: Any) -> Any:
        for group in owners_of(args, positions):
            group.allocate()
        return compiled(*args)

    return run if kept else compiled
