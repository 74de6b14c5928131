"""Full sizes, and copies that only move bytes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from compile_fsdp.passes import Kept
from compile_fsdp.passes.analysis.layout import find_copy_fault, is_full, needed_bytes, size_hint

STRIDED = torch.empty(4, 4)
SPARSE = torch.empty(4, 4, layout=torch.sparse_coo)


@pytest.mark.parametrize(
    ("tensor", "size_bytes"),
    [
        (torch.empty(4, 4), 64),
        (torch.empty(4, 4).t()[1:], 64),
        (torch.empty(16)[:12].view(3, 4), 48),
        (torch.empty(4, 0), 0),
        (torch.empty(0, 4), 0),
    ],
)
def test_needed_bytes_reach_to_the_last_element(tensor: torch.Tensor, size_bytes: int) -> None:
    assert needed_bytes(tensor) == size_bytes


@pytest.mark.parametrize(("size_bytes", "tensor"), [(None, STRIDED), (64, None), (64, SPARSE), (63, STRIDED)])
def test_size_that_is_unknown_or_too_small_is_not_full(size_bytes: int | None, tensor: torch.Tensor | None) -> None:
    assert is_full(64, STRIDED)
    assert not is_full(size_bytes, tensor)


@pytest.mark.parametrize(
    ("parameter", "value", "fault"),
    [
        (STRIDED, STRIDED, None),
        (None, STRIDED, Kept.UNKNOWN_LAYOUT),
        (STRIDED, None, Kept.UNKNOWN_LAYOUT),
        (SPARSE, SPARSE, Kept.UNKNOWN_LAYOUT),
        (STRIDED, SPARSE, Kept.UNKNOWN_LAYOUT),
        (STRIDED, STRIDED.double(), Kept.COPY_CONVERTS),
        (STRIDED, STRIDED.to("meta"), Kept.COPY_CONVERTS),
        (STRIDED.cfloat(), STRIDED.cfloat().conj(), Kept.COPY_CONVERTS),
        (STRIDED, STRIDED[0], Kept.COPY_BROADCASTS),
        (STRIDED, STRIDED.t(), Kept.COPY_RESTRIDES),
    ],
)
def test_copy_that_does_more_than_move_bytes_is_a_fault(
    parameter: torch.Tensor | None, value: torch.Tensor | None, fault: Kept | None
) -> None:
    assert find_copy_fault(parameter, value) is fault


def test_symbolic_size_counts_with_its_hint() -> None:
    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(6, ConstantSource("rows"), DimDynamic.DYNAMIC)
    assert size_hint(shape_env.create_symintnode(symbol, hint=6)) == 6
    assert size_hint(shape_env.create_unbacked_symint()) == 0
    assert (size_hint(6), size_hint(None)) == (6, 0)
