"""Writes of a gathered parameter that are found in a Dynamo graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from compile_fsdp.ops import resize_storage_bytes_
from compile_fsdp.passes.analysis.parameter_writes import find_refused_writes
from helpers.graphs.capture import capture


def _capture(function: Callable[[Tensor, Tensor, Tensor], Tensor], freed: bool) -> tuple[fx.GraphModule, fx.Node]:
    """The graph of a function of a batch, rows and a weight, and the weight's placeholder."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    _, graph = capture(function, torch.randn(2, 4), torch.arange(2), weight)
    placeholder = next(node for node in graph.find_nodes(op="placeholder") if "weight" in node.name)
    if freed:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(resize_storage_bytes_, (placeholder, 0))
    assert graph.owning_module is not None
    return graph.owning_module, placeholder


def _copy(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        weight.copy_(functional.normalize(weight, dim=1))
    return x @ weight.t()


def _view(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        weight.view(2, 8)[0].zero_()
    return x @ weight.t()


def _data(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    weight.data.mul_(0.5)
    return x @ weight.t()


def _in_checkpoint(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(_copy, x, rows, weight, use_reentrant=False)


def _table(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding(rows, weight, max_norm=0.5) + x


def _reads(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    x = functional.batch_norm(x @ weight.t(), torch.zeros(4), torch.ones(4), weight[0], weight[1], training=True)
    return functional.embedding(rows, weight).relu_() + x.add_(1.0)


WRITES = [_copy, _view, _data, _in_checkpoint, _table]


@pytest.mark.parametrize("function", WRITES, ids=lambda each: each.__name__)
def test_a_write_of_a_parameter_that_is_freed_is_found(function: Callable[..., Tensor]) -> None:
    gm, weight = _capture(function, freed=True)
    assert find_refused_writes(gm, [weight]) == {weight}


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _free(tensors: list[Tensor], sizes: list[int]) -> None:
    """Stand for the group call that frees parameters."""


def _freed_in_checkpoint(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    def body(x: Tensor, weight: Tensor) -> Tensor:
        product = _copy(x, rows, weight)
        _free([weight], [64])
        return product

    return checkpoint(body, x, weight, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_write_of_a_parameter_that_a_body_frees_is_found() -> None:
    gm, weight = _capture(_freed_in_checkpoint, freed=False)
    assert find_refused_writes(gm, [weight], _free) == {weight}
    assert find_refused_writes(gm, [weight]) == set()


def test_reads_and_writes_of_other_tensors_are_accepted() -> None:
    gm, weight = _capture(_reads, freed=True)
    assert find_refused_writes(gm, [weight]) == set()


@pytest.mark.parametrize(("function", "is_found"), [(_copy, False), (_table, True)])
def test_a_parameter_that_stays_unsharded_may_be_written_but_not_renormalized(
    function: Callable[..., Tensor], is_found: bool
) -> None:
    gm, weight = _capture(function, freed=False)
    assert bool(find_refused_writes(gm, [weight])) is is_found
