"""Join and split packs by kernels that need no compilation.

The ops compute ATen's ops of these names; `cat` also casts, in the same copy. Inductor would generate a separate loop
for every tensor, with the tensor's place in the pack as a constant. So in packs of several groups, no two groups would
share a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_fsdp.torch_compat.dispatch import foreach_copy

_LIBRARY = torch.library.Library("compile_fsdp", "FRAGMENT")
_LIBRARY.define("cat(Tensor[] tensors, int dim=0, ScalarType? dtype=None) -> Tensor")
_LIBRARY.define("split_with_sizes_copy(Tensor input, int[] split_sizes, int dim) -> Tensor[]")

cat = torch.ops.compile_fsdp.cat.default
split_with_sizes_copy = torch.ops.compile_fsdp.split_with_sizes_copy.default


@torch.library.impl(_LIBRARY, "cat", "CompositeExplicitAutograd")
def _cat(tensors: list[Tensor], dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        return torch.cat(tensors, dim)
    shape = list(tensors[0].shape)
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape[dim] = sum(sizes)
    pack = tensors[0].new_empty(shape, dtype=dtype)
    foreach_copy(list(pack.split(sizes, dim)), tensors)  # one kernel for all, if the parts are contiguous
    return pack


# It returns contiguous copies.
_LIBRARY.impl("split_with_sizes_copy", torch.ops.aten.split_with_sizes_copy.default, "CompositeExplicitAutograd")
