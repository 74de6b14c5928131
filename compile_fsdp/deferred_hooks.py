"""Hooks on tensors of the forward, from Dynamo's forward graph to the captured backward.

Dynamo gives the compiled forward an object that gets the hooks once the forward has run, and calls in the graph that
put the hooks on their tensors. The graph that is compiled has neither: see [Note: Hooks by number].

    forward graph                             captured backward
    watch(tensor, 0)                          hooked = call_hook(grad, state, "hook0")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_fsdp.compat import copy_dynamo_graph, deferred_hook, is_hooks_input
from compile_fsdp.ops import watch


@dataclass(frozen=True, slots=True)
class DeferredHooks:
    """The hooks of one forward graph.

    Attributes:
        position: Of the object that holds them, among the inputs of the graph.
        names: Their attributes of that object, by number.
    """

    position: int
    names: tuple[str, ...]

    def split(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """The other inputs of the graph, and the object."""
        return [*args[: self.position], *args[self.position + 1 :]], args[self.position]


def take_hooks(gm: fx.GraphModule) -> tuple[fx.GraphModule, DeferredHooks | None]:
    """A graph without hooks, for the compiler; `gm` itself if it has none, or some that no number can stand for.

    Dynamo goes on to read the inputs of `gm`, which therefore stays as it is.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    position = next((i for i, node in enumerate(placeholders) if is_hooks_input(node)), None)
    if position is None or any(deferred_hook(user) is None for user in placeholders[position].users):
        return gm, None
    own = copy_dynamo_graph(gm)
    state = own.graph.find_nodes(op="placeholder")[position]
    names: list[str] = []
    for node in list(state.users):
        hook = deferred_hook(node)
        assert hook is not None
        with own.graph.inserting_before(node):
            own.graph.call_function(watch, (hook.tensor, len(names))).meta.update(node.meta)
        names.append(hook.name)
        own.graph.erase_node(node)
    own.graph.erase_node(state)
    return own, DeferredHooks(position, tuple(names))


def call_hooks(captured: fx.GraphModule, hooks: DeferredHooks) -> None:
    """Let a captured backward call its hooks; their object becomes its last input."""
    graph = captured.graph
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        state = graph.placeholder("state")
    for node in graph.find_nodes(op="call_function", target=torch.ops.compile_fsdp.hook_point.default):
        grad, number = node.args
        with graph.inserting_before(node):
            called = graph.call_function(_call_hook, (grad, state, hooks.names[number]))
        node.replace_all_uses_with(called)
        graph.erase_node(node)


def _call_hook(grad: torch.Tensor, state: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        changed: torch.Tensor | None = getattr(state, name)(grad)
    return grad if changed is None else changed
