"""Format nodes as comparable lines of text: a line changes only if the computation of its node changes."""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator, OpOverload, op_name


def format_node(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}{_type(node)}"
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    arguments = [str(argument) for argument in node.args]
    arguments += [f"{name}={argument}" for name, argument in node.kwargs.items()]
    return f"{node.name}{_type(node)} = {operation(node)}({', '.join(arguments)})"


def operation(node: fx.Node) -> str:
    """The name of the op that a node calls, `aten.mm` for example."""
    target = node.target
    if isinstance(target, OpOverload | HigherOrderOperator):
        namespace, _, rest = op_name(target).rpartition("::")
        name = rest.partition(".")[0]
        return f"{namespace.removeprefix('_')}.{name}" if namespace else name
    return getattr(target, "__name__", str(target))


def _type(node: fx.Node) -> str:
    if (tensor := find_fake_tensor(node)) is None:
        return ""
    return f": {str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
