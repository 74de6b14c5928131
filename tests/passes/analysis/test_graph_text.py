"""A graph's text tells graphs of ranks apart that compute differently, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.graph_text import graph_text


def _text(constant: Any, group: str = "a", groups: tuple[str, ...] = ("a", "b"), body: float = 1.0) -> str:
    graph, inner = fx.Graph(), fx.Graph()
    inner.output(inner.call_function(torch.mul, (inner.placeholder("y"), body)))
    x = graph.placeholder("x")
    called = graph.call_function(torch.full_like, (x,), {"group": [group, {"again": group}]})
    graph.call_module("body", (called,))
    graph.output(called)
    gm = fx.GraphModule({"body": fx.GraphModule({}, inner)}, graph)
    called.args = (x, constant)  # here, because an object has no code
    return graph_text(gm, groups)


def test_constants_of_a_graph_and_of_its_subgraphs_are_in_the_text() -> None:
    texts = [_text(1), _text(1.0), _text("1"), _text(torch.float32), _text(None), _text(1, body=2.0)]
    assert len(set(texts)) == len(texts)


def test_names_of_process_groups_and_numbers_of_devices_are_not_in_the_text() -> None:
    assert _text(1, "a") == _text(1, "b") != _text(1, "c")
    assert _text(torch.device("cuda", 0)) == _text(torch.device("cuda", 1)) != _text(torch.device("cpu"))


def test_different_groups_have_different_numbers() -> None:
    assert _text("a", "a") == _text("b", "b") != _text("a", "b") == _text("b", "a")


def test_objects_are_shown_without_their_address() -> None:
    assert _text(object()) == _text(object()) != _text(())
