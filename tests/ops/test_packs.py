"""Packs are joined and split as ATen does it; parts of a pack are no views of it."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp import ops
from compile_fsdp.torch_compat.dispatch import FakeTensorMode

SIZES = [1, 4, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_pack_equals_the_joined_tensors_and_shares_no_storage(dtype: torch.dtype) -> None:
    rows = [torch.randn(2, size).to(dtype) for size in SIZES]
    pack = ops.cat([*rows[:2], rows[2].t().contiguous().t()], 1)
    assert pack.equal(torch.cat(rows, 1))
    parts = ops.split_with_sizes_copy(pack, SIZES, 1)
    pack.zero_()
    assert all(part.equal(row) and part.is_contiguous() for part, row in zip(parts, rows, strict=True))


def test_flat_shards_are_joined_along_their_only_dim() -> None:
    assert ops.cat([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_cast_on_their_way_into_the_pack(dtype: torch.dtype, dim: int) -> None:
    tensors = [torch.randn(2, 3, dtype=each) for each in (torch.float32, torch.bfloat16, torch.float64)]
    tensors.append(torch.randn(3, 2).t())
    assert ops.cat(tensors, dim, dtype).equal(torch.cat([tensor.to(dtype) for tensor in tensors], dim))
    with FakeTensorMode() as mode:
        fake = ops.cat([mode.from_tensor(tensor) for tensor in tensors], dim, dtype)
    assert (fake.shape, fake.dtype) == (torch.cat(tensors, dim).shape, dtype)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    with FakeTensorMode():
        pack = ops.cat([torch.empty(2, size) for size in SIZES], 1)
        assert [(part.shape, part.stride()) for part in ops.split_with_sizes_copy(pack, SIZES, 1)] == [
            ((2, size), (size, 1)) for size in SIZES
        ]
