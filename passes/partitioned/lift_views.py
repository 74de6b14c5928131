"""Compute views for the backward before their parameter is freed.

Precondition  a forward from AOTAutograd's partitioner, which saves views of inputs
Match         declared views of an input, behind a resize(0) of the input, that the forward only returns
Rewrite       the view moves before that resize; nothing else reads the input there
Report        number of moved views

    before                                    after
    y = mm(x, weight)                         y = mm(x, weight)
    resize_storage_bytes_(weight, 0)          saved = transpose(weight, 1, 2)
    saved = transpose(weight, 1, 2)           resize_storage_bytes_(weight, 0)
    return y, saved                           return y, saved

A view of a freed storage cannot be made. A view made earlier is valid again when the backward refills the storage.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import is_declared_view
from compile_fsdp.passes.analysis.effects import is_resize, parameter_of
from compile_fsdp.passes.analysis.layout import is_free


def lift_views(graph: fx.Graph) -> int:
    inputs: dict[fx.Node, fx.Node] = {}  # by view, the input under it
    freed: dict[fx.Node, fx.Node] = {}  # by input, the resize(0) that has freed it
    lifted = 0
    for node in list(graph.nodes):
        if node.op == "placeholder":
            inputs[node] = node
        elif is_resize(node) and (resized := parameter_of(node)) is not None:
            freed.pop(resized, None)
            if is_free(node):
                freed[resized] = node
        elif is_declared_view(node) and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in inputs:
            inputs[node] = inputs[node.all_input_nodes[0]]
            if (free := freed.get(inputs[node])) is not None and _is_only_returned(node):
                free.prepend(node)
                lifted += 1
    return lifted


def _is_only_returned(node: fx.Node) -> bool:
    """Return whether the graph only returns a view. A reader of its data, which is freed, must fail."""
    return all(user.op == "output" or (is_declared_view(user) and _is_only_returned(user)) for user in node.users)
