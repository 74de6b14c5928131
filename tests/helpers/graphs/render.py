"""Print a graph for golden tests.

The text does not depend on node names, overload names or torch's own printers, which change between releases.
"""

from __future__ import annotations

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int64: "i64",
    torch.bool: "bool",
}


def render(graph: fx.Graph) -> str:
    """One line per node; a call without a result has no left-hand side. Subgraphs follow, indented."""
    labels: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            labels[node] = str(node.target)
            lines.append(f"{node.target}{_type(node)}")
        elif node.op == "output":
            lines.append(f"return {_arguments(node, labels)}")
        elif node.op == "get_attr":
            labels[node] = str(node.target)
        elif not _begins_clone(node):
            call = _clone(node, labels) or f"{_target(node)}({_arguments(node, labels)})"
            if _has_value(node):
                labels[node] = f"%{sum(label.startswith('%') for label in labels.values())}"
                call = f"{labels[node]}{_type(node)} = {call}"
            lines.append(call)
    text = "".join(f"{line}\n" for line in lines)
    return text + "".join(_render_subgraph(node) for node in graph.nodes if node.op == "get_attr")


def render_calls(graph: fx.Graph) -> str:
    """Render a graph and its subgraphs without their inputs."""
    return "".join(line for line in render(graph).splitlines(keepends=True) if "(" in line or line.endswith(":\n"))


def _render_subgraph(node: fx.Node) -> str:
    module = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(module, fx.GraphModule):
        return ""
    return f"{node.target}:\n" + "".join(f"  {line}\n" for line in render(module.graph).splitlines())


def _begins_clone(node: fx.Node) -> bool:
    """Whether a node is the `empty_strided` of a clone, written since torch 2.12 as `empty_strided` and `copy`."""
    if node.op != "call_function" or _target(node) != "empty_strided" or len(node.users) != 1:
        return False
    (user,) = node.users
    return _target(user) == "copy" and user.args[0] is node


def _clone(node: fx.Node, labels: dict[fx.Node, str]) -> str | None:
    """Render the `copy` of a clone like torch 2.11's clone op; None for other nodes."""
    first = node.args[0] if node.args else None
    if not (isinstance(first, fx.Node) and _begins_clone(first)):
        return None
    return f"clone({_argument(node.args[1], labels)}, memory_format=torch.contiguous_format)"


def _has_value(node: fx.Node) -> bool:
    return bool(node.users) or isinstance(fake_value(node), (torch.Tensor, torch.SymInt, tuple, list))


def _type(node: fx.Node) -> str:
    value = fake_value(node)
    if isinstance(value, torch.Tensor):
        return f": {_DTYPES[value.dtype]}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, torch.SymInt):
        return f": {value}"
    return ""


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return f".{node.target}"
    return node.target.__name__.split(".")[0]


def _arguments(node: fx.Node, labels: dict[fx.Node, str]) -> str:
    if node.op == "output":
        return _argument(node.args[0], labels)
    positional = [_argument(argument, labels) for argument in node.args]
    return ", ".join(positional + [f"{k}={_argument(v, labels)}" for k, v in node.kwargs.items()])


def _argument(argument: object, labels: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return labels[argument]
    if isinstance(argument, (tuple, list)):
        items = [_argument(item, labels) for item in argument]
        if isinstance(argument, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key}: {_argument(value, labels)}" for key, value in argument.items()) + "}"
    if callable(argument) and hasattr(argument, "__name__"):
        return str(argument.__name__).split(".")[0]
    return repr(argument)
