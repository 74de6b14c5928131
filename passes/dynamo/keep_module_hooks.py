"""Keep the full backward hooks of modules none of whose inputs needs a gradient.

Precondition  a forward graph, as Dynamo has traced it
Match         the hooks of a module whose inputs, in the graph, have no gradient
Rewrite       they are called like backward pre-hooks
Report        nothing, because the hooks are called as in eager PyTorch

    before                                       after
    hooks = _in_graph_bw_hooks(state)            hooks = make_hooks(state)
    args = hooks.setup_input_hook((tokens,))     args = hooks.setup_input_hook((tokens,))

Eager PyTorch calls such hooks with the gradients of the module's outputs. In a traced backward nothing reads the result
of this call, so AOTAutograd would remove it. It reads the result of a pre-hook: the gradients of the outputs.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.effects import nodes_in
from compile_fsdp.torch_compat.autograd import call_with_output_gradients, makes_module_hooks


def keep_module_hooks(graph: fx.Graph) -> None:
    for call in graph.find_nodes(op="call_method", target="setup_input_hook"):
        hooks, inputs = call.args
        tensors = [tensor for node in nodes_in(inputs) if (tensor := find_fake_tensor(node)) is not None]
        if makes_module_hooks(hooks) and not any(tensor.requires_grad for tensor in tensors):
            hooks.target = call_with_output_gradients(hooks.target, len(inputs))
