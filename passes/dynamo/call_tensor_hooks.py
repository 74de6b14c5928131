"""Call the hooks that `lift_tensor_hooks` has taken out of the forward.

Precondition  a graph as compiled autograd has captured it
Match         `hook_point`, with the number of its hook
Rewrite       a call of the hook; the object that holds the hooks becomes the graph's last input
Report        nothing, because every number has a hook

    before                                    after
    marked = hook_point(grad, 0)              called = _call_hook(grad, state, "hook0")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def call_tensor_hooks(graph: fx.Graph, hooks: Sequence[str]) -> None:
    """Replace each hook point by a call of its hook.

    `hooks`: by number, the name of the hook's attribute on the object that holds the hooks.
    """
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        state = graph.placeholder("state")
    for node in graph.find_nodes(op="call_function", target=torch.ops.compile_fsdp.hook_point.default):
        grad, number = node.args
        with graph.inserting_before(node):
            called = graph.call_function(_call_hook, (grad, state, hooks[number]))
        node.replace_all_uses_with(called)
        graph.erase_node(node)


def _call_hook(grad: torch.Tensor, state: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        changed: torch.Tensor | None = getattr(state, name)(grad)
    return grad if changed is None else changed
