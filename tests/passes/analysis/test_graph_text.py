"""A graph's text tells graphs of ranks apart that compute differently, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from compile_fsdp.passes.analysis.graph_text import graph_text


def _text(
    constant: Any, group: str = "a", body: float = 1.0, function: Any = torch.full_like, method: str = "sin"
) -> str:
    graph, inner = fx.Graph(), fx.Graph()
    inner.output(inner.call_function(torch.mul, (inner.placeholder("y"), body)))
    x = graph.placeholder("x")
    called = graph.call_function(function, (x,), {"group": [group, {"again": group}]})
    node = graph.create_node("call_method", method, (called,), name="node")
    graph.call_module("body", (node,))
    graph.call_module("plain", (node,))
    graph.output(node)
    gm = fx.GraphModule({"body": fx.GraphModule({}, inner), "plain": nn.Tanh()}, graph)
    called.args = (x, constant)  # here, because an object has no code
    return graph_text(gm, ("a", "b"))


def test_constants_of_a_graph_and_of_its_subgraphs_are_in_the_text() -> None:
    constants = 1, 1.0, "1", torch.float32, None, "x"
    texts = [*map(_text, constants), _text(1, body=2.0), _text(1, method="cos"), _text(1, function=torch.add)]
    assert len(set(texts)) == len(texts)
    assert all("%x" in text for text in texts)  # the input


def test_names_of_process_groups_and_numbers_of_devices_are_not_in_the_text() -> None:
    assert _text(1, "a") == _text(1, "b") != _text(1, "c")
    assert _text(torch.device("cuda", 0)) == _text(torch.device("cuda", 1)) != _text(torch.device("cpu"))


def test_different_groups_have_different_numbers() -> None:
    assert _text("a", "a") == _text("b", "b") != _text("a", "b") == _text("b", "a")


def _same_name() -> Any:
    return lambda x, group: x


def test_objects_and_functions_are_shown_without_their_address() -> None:
    assert _text(object()) == _text(object()) != _text(())
    assert _text(1, function=_same_name()) == _text(1, function=_same_name())
