"""Capture a function's graph, and a training step's graphs before and after the passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import compile_fsdp.backend.inner as backend
from compile_fsdp.passes import Pipeline
from helpers.graphs.render import render


class _Rendering(Pipeline):
    """A pipeline that records its input and output graphs as text."""

    graphs: list[str]

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append(render(graph))
        super().__call__(graph)
        self.graphs.append(render(graph))


def capture(function: Callable[..., Any], *inputs: Any, by_aot: bool = False) -> tuple[Any, fx.Graph]:
    """Compile a function to one graph, of Dynamo or `by_aot` of AOTAutograd, and run it; return result and graph."""
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep) if by_aot else keep
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    return result, graph


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Disable graph caches, because passes skip cached graphs. Compiled C++ may still come from a cache."""
    forward, both = torch._inductor.config, torch._functorch.config
    with forward.patch(fx_graph_cache=False), both.patch(enable_autograd_cache=False):
        yield


def render_step(model: nn.Module, run: Callable[[], torch.Tensor], **options: Any) -> list[str]:
    """Compile and run a model; render its graphs around the passes.

    Returns the forward before and after the passes, then the backward. Renders process groups as `dp` and leaves out
    the collectives' names in profiles.
    """
    _Rendering.graphs = []
    with mock.patch.object(backend, "Pipeline", _Rendering), without_graph_caches():
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        run().backward()
    return [re.sub(r", '[\w:]+'(, 'FSDP::.*')?\)$", ", dp)", graph, flags=re.M) for graph in _Rendering.graphs]


def events(graph: str) -> list[str]:
    """List a rendered graph's events, such as "gather[16]", "mm[2, 4]" or "reduce[8]"."""
    names = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "mm": "mm"}
    found = []
    for line in graph.splitlines():
        match = re.match(r"%\d+: \w+\[([\d, ]+)\] = (\w+)\(", line)
        if match and match[2] in names:
            found.append(f"{names[match[2]]}[{match[1]}]")
    return found
