"""Run a post-grad graph on all ranks of a simulated world, node by node.

Until the wait of a collective its input must not change, and its output is NaN. This catches a pass that moves a write
of the input or a read of the output between launch and wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.collectives import collective_arguments

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(slots=True)
class _Flight:
    """A collective between launch and wait; each list has an item per rank."""

    sent: list[torch.Tensor]  # inputs
    copies: list[torch.Tensor]  # copies of the inputs at the launch
    buffers: list[torch.Tensor]  # outputs, NaN until the wait
    results: list[torch.Tensor]  # the outputs after the wait

    def land(self) -> None:
        for sent, copy in zip(self.sent, self.copies, strict=True):
            assert sent.untyped_storage().nbytes() and torch.equal(sent, copy), "what is sent is not written meanwhile"
        for buffer, result in zip(self.buffers, self.results, strict=True):
            buffer.copy_(result)


class _Rank(fx.Interpreter):
    def __init__(self, graph: fx.Graph, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.args_iter = iter([inputs[str(node.target)] for node in graph.find_nodes(op="placeholder")])

    def arguments(self, node: fx.Node) -> tuple[Any, ...]:
        return self.fetch_args_kwargs_from_env(node)[0]

    def step(self, node: fx.Node) -> None:
        self.env[node] = self.run_node(node)


def run_ranks(graph: fx.Graph, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Run the graph on all ranks and return each rank's results.

    Args:
        graph: Its collectives go over all ranks, whatever the name of their group.
        inputs: For each rank, tensors by placeholder; the graph may write them in place.
    """
    ranks = [_Rank(graph, each) for each in inputs]
    flights: dict[int, _Flight] = {}  # by rank 0's buffer
    with torch.no_grad():
        for node in graph.nodes:
            if (call := collective_arguments(node)) is not None:
                flight = _launch(ranks, node, str(call["kind"]), call.get("reduce_op"))
                flights[id(flight.buffers[0])] = flight
                continue
            if node.target is _WAIT and (flight := flights.pop(id(ranks[0].arguments(node)[0]), None)) is not None:
                flight.land()
            if node.target is _WAIT:
                for rank in ranks:
                    rank.env[node] = rank.arguments(node)[0]
                continue
            for rank in ranks:
                rank.step(node)
    assert not flights, "every collective is waited for"
    output = graph.output_node()
    return [list(rank.env[output]) for rank in ranks]


def _launch(ranks: list[_Rank], node: fx.Node, kind: str, op: object) -> _Flight:
    sent = [rank.arguments(node)[0] for rank in ranks]
    copies = [each.clone() for each in sent]
    results = _results(kind, op, copies)
    buffers = [torch.full_like(result, torch.nan) for result in results]
    for rank, buffer in zip(ranks, buffers, strict=True):
        rank.env[node] = buffer
    return _Flight(sent, copies, buffers, results)


def _results(kind: str, op: object, sent: list[torch.Tensor]) -> list[torch.Tensor]:
    if kind == "all_gather_into_tensor":
        return [torch.cat(sent) for _ in sent]
    total = torch.stack(sent).sum(0)
    total = total / len(sent) if op == "avg" else total
    return [total.clone() for _ in sent] if kind == "all_reduce" else list(total.chunk(len(sent)))


@contextmanager
def same_results(graph: fx.Graph, ranks: int = 2) -> Iterator[None]:
    """Check that the block changes no result of the graph, on random whole numbers with exact sums and products."""
    values = {str(node.target): node.meta["val"] for node in graph.find_nodes(op="placeholder")}

    def draw() -> dict[str, torch.Tensor]:
        return {name: torch.randint(-2, 3, each.shape).to(each.dtype) for name, each in values.items()}

    given = [draw() for _ in range(ranks)]

    def results() -> list[list[torch.Tensor]]:
        return run_ranks(graph, [{name: tensor.clone() for name, tensor in each.items()} for each in given])

    before = results()
    yield
    graph.lint()
    torch.testing.assert_close(results(), before, rtol=0, atol=0)
