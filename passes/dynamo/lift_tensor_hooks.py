"""Take the hooks on tensors out of a forward graph, and leave a number for each.

Precondition  a forward graph, as Dynamo has traced it: a copy, since Dynamo goes on to read the inputs of its own
Match         the input that holds the hooks once the forward has run, and calls that put hooks on their tensors
Rewrite       each call becomes one of `watch`, with the hook's number; the input goes
Report        where the input was, and the hooks by number; None where nothing changed

    before                                    after
    register_hook(tensor, hooks.hook0)        watch(tensor, 0)

See [Note: Hooks by number]. `call_tensor_hooks` lets the backward call them.

[Note: Hooks within a checkpoint]
What a checkpoint's body does with hooks no number can stand for. Then the input stays, and so do the hooks on plain
tensors, which AOTAutograd traces itself. It has no rule for those on tensor subclasses: these are taken out.
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
    """The hooks of one forward graph.

    Attributes:
        position: Of the object that holds them, among the inputs of the graph.
        names: Their attributes of that object, by number.
        is_whole: Whether they are all that the graph does with the object.
    """

    position: int
    names: tuple[str, ...]
    is_whole: bool = True

    def split(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """What is left of the graph's inputs, and the object."""
        others = [*args[: self.position], *args[self.position + self.is_whole :]]
        return others, args[self.position]


def lift_tensor_hooks(graph: fx.Graph) -> DeferredHooks | None:
    """Take the hooks out; None if there are none, or none that can be: see [Note: Hooks within a checkpoint].

    Raises:
        UnsupportedFeatureError: a hook of the user's is on a tensor subclass, as a DTensor. It would get the gradient's
            local tensor.
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
