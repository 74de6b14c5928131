"""Replace the tensor hooks in a forward graph by numbers.

Precondition  a copy of a forward graph that Dynamo has traced, because Dynamo still reads the inputs of its graph
Match         the input that holds the hooks once the forward has run, and calls that put hooks on their tensors
Rewrite       each call becomes a call of `watch` with the hook's number; the input is erased
Report        position of the input, and the hooks by number; None if nothing changed

    before                                    after
    register_hook(tensor, hooks.hook0)        watch(tensor, 0)

See [Note: Hooks by number]. `call_tensor_hooks` lets the backward call them.

[Note: Hooks within a checkpoint]
No number can stand for hooks in the body of a checkpoint. If there are any, the input stays, and so do all hooks on
plain tensors, which AOTAutograd traces itself. It has no rule for hooks on tensor subclasses, so these are taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_fsdp.errors import UnsupportedFeatureError
from compile_fsdp.ops import watch
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.torch_compat.dispatch import is_wrapper_subclass
from compile_fsdp.torch_compat.dynamo import deferred_hook, is_hooks_input, traced_in


@dataclass(frozen=True, slots=True)
class DeferredHooks:
    """Hooks of one forward graph."""

    position: int  # among the graph's inputs, of the object that holds the hooks
    names: tuple[str, ...]  # by number, the name of the hook's attribute on that object
    is_whole: bool = True  # the graph does nothing else with the object

    def split(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the inputs of the rewritten graph, and the object."""
        others = [*args[: self.position], *args[self.position + self.is_whole :]]
        return others, args[self.position]


def lift_tensor_hooks(graph: fx.Graph) -> DeferredHooks | None:
    """Take the hooks out; None if none can be taken out. See [Note: Hooks within a checkpoint].

    Raises:
        UnsupportedFeatureError: A hook of the user is on a tensor subclass, such as a DTensor.
    """
    placeholders = graph.find_nodes(op="placeholder")
    position = next((i for i, node in enumerate(placeholders) if is_hooks_input(node)), None)
    if position is None:
        return None
    state = placeholders[position]
    hooks = {node: deferred_hook(node) for node in state.users}
    is_whole = None not in hooks.values()
    names: list[str] = []
    for node, hook in hooks.items():
        value = None if hook is None else fake_value(hook.tensor)
        if hook is None or not (is_whole or is_wrapper_subclass(value)):
            continue
        if is_wrapper_subclass(value) and not traced_in(node, "compile_fsdp/runtime/"):
            raise UnsupportedFeatureError(
                f"expected hooks on plain tensors, got one on a {type(value).__name__}, whose gradient is a local "
                "tensor in a compiled backward; put the hook on what to_local() returns, or leave it out"
            )
        with graph.inserting_before(node):
            graph.call_function(watch, (hook.tensor, len(names))).meta.update(node.meta)
        names.append(hook.name)
        graph.erase_node(node)
    if is_whole:
        graph.erase_node(state)
    return DeferredHooks(position, tuple(names), is_whole) if is_whole or names else None
