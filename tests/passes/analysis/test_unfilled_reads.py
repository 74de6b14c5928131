"""Parameters that a backward graph reads without a fill."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from compile_fsdp.ops import accumulate_gradient
from compile_fsdp.passes.analysis.unfilled_reads import find_unfilled_reads
from helpers.graphs.build import Layer


def call_aot_bwd_prologue(*saved: torch.Tensor) -> list[torch.Tensor]:
    """Stand-in for compiled autograd's prologue, which returns all saved tensors."""
    return list(saved)


@pytest.fixture
def layer() -> Layer:
    return Layer(is_of_dynamo=True)


def _unfilled(layer: Layer, *results: fx.Node) -> list[fx.Node]:
    return find_unfilled_reads(layer.build.output(*results), [layer.weight])


@pytest.mark.parametrize(("steps", "is_found"), [("read free", True), ("fill read free", False)])
def test_a_read_that_nothing_fills_is_found(layer: Layer, steps: str, is_found: bool) -> None:
    assert _unfilled(layer, *layer.add(steps)) == [layer.weight] * is_found


def test_a_read_of_a_view_is_found(layer: Layer) -> None:
    view = layer.build.call_method("view", layer.weight, 2, 8)
    assert _unfilled(layer, layer.build.call(torch.neg, view)) == [layer.weight]


def test_a_read_behind_the_prologue_is_found(layer: Layer) -> None:
    saved = layer.build.call(call_aot_bwd_prologue, layer.weight, layer.x)
    weight = layer.build.call(lambda items: items[0], saved)
    assert _unfilled(layer, layer.build.call(torch.neg, weight)) == [layer.weight]


def test_accumulating_a_gradient_is_no_read(layer: Layer) -> None:
    layer.build.call_opaque(accumulate_gradient, [layer.value], layer.weight, None, False)
    assert _unfilled(layer, layer.build.call(torch.neg, layer.x)) == []


def test_freeing_and_passing_through_the_prologue_are_no_reads(layer: Layer) -> None:
    layer.build.call(call_aot_bwd_prologue, layer.weight, layer.x)
    layer.free()
    assert _unfilled(layer, layer.build.call(torch.neg, layer.x)) == []


def test_returning_a_parameter_is_no_read(layer: Layer) -> None:
    assert _unfilled(layer, layer.weight) == []
