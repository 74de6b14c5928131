"""Calls of blocks by name."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_fsdp.ops import ensure_lowerings
from compile_fsdp.ops.call_block import Part, call_block, op_by_op
from helpers.graphs.capture import without_graph_caches
from helpers.releases.skip import skip_before


def _twice(size: int, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.view(size, -1) * 2,)


def _part(run: Any, results: tuple[tuple[Any, ...], ...] | None = None) -> Part:
    return Part(run, "twice", fx.symbolic_trace(_twice), (), results)


def test_block_takes_sizes_and_then_tensors_in_a_list_of_its_own() -> None:
    def run(inputs: list[Any]) -> list[torch.Tensor]:
        size, x = inputs
        inputs.clear()
        return [x.reshape(size, -1) * 3]

    part, tensors = _part(run), [torch.ones(4)]
    assert torch.equal(call_block(tensors, [2], part.name)[0], torch.full((2, 2), 3.0))
    assert len(tensors) == 1
    with op_by_op():
        assert torch.equal(call_block(tensors, [2], part.name)[0], torch.full((2, 2), 2.0))


@pytest.mark.parametrize(
    "results", [None, (((2, 2), (2, 1), torch.float32, torch.device("cpu")),)], ids=["by the ops", "known"]
)
def test_result_of_a_fake_call_has_the_layout_of_the_real_one(results: tuple[tuple[Any, ...], ...] | None) -> None:
    part = _part(None, results)
    with FakeTensorMode():
        (result,) = call_block([torch.ones(4)], [2], part.name)
    assert (result.shape, result.stride(), result.dtype) == ((2, 2), (2, 1), torch.float32)


def test_name_of_a_block_that_is_gone_is_unknown() -> None:
    part = _part(None)
    name = part.name
    del part
    with pytest.raises(KeyError, match=name):
        call_block([torch.ones(4)], [2], name)


def test_generated_code_leaves_no_reference_to_an_input_that_it_hands_over() -> None:
    skip_before("2.13")
    freed = []

    def run(inputs: list[Any]) -> list[torch.Tensor]:
        observed, result = weakref.ref(inputs[1]), inputs[1].view(2, -1) * 2
        inputs.clear()
        freed.append(observed() is None)
        return [result]

    block = _part(run)
    ensure_lowerings()

    def function(x: torch.Tensor, is_read_later: bool) -> Any:
        y = x + 1
        (result,) = call_block([y], [2], block.name)
        return result, y if is_read_later else 0

    with torch.no_grad(), without_graph_caches():
        for is_read_later in (False, True):
            torch._dynamo.reset()
            result, _ = torch.compile(function, fullgraph=True)(torch.ones(4), is_read_later)
            assert torch.equal(result, torch.full((2, 2), 4.0))
    assert freed == [True, False]
